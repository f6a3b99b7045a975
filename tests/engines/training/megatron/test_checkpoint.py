"""Checkpoints, and updates that are refused, of two ranks in one launch."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.training.builders import make_engine, model_folder
from tests.engines.training.megatron.cases import BATCH, LAYERS
from tests.engines.training.megatron.checkpoint_cases import FREEZING, LAYOUTS, SUCCESSIONS, launched
from tests.engines.training.ranks import run_megatron_ranks

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]  # the first test waits for all launches


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def reports(work: Path) -> list[dict[str, Any]]:
    folder = model_folder(work / "model")
    model_folder(work / "teacher", "llama", layers=3)
    model_folder(work / "deep", layers=LAYERS)
    model_folder(work / "experts", "qwen3_moe", layers=LAYERS)
    run_megatron_ranks(launched, folder, work, world_size=2)
    return [json.loads((work / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def report(reports: list[dict[str, Any]]) -> dict[str, Any]:
    return reports[0]


def test_a_resumed_run_equals_an_uninterrupted_one_bitwise_at_the_same_layout(report: dict[str, Any]) -> None:
    assert report["tensor"]["resumed digest"] == report["tensor"]["digest"]
    assert report["tensor"]["resumed"] == report["tensor"]["metrics"]
    assert report["plain resumed"] == report["plain"]
    assert report["data"]["metrics by data"] == report["data"]["metrics"]


@pytest.mark.parametrize("what", FREEZING)
def test_a_resumed_run_of_a_model_that_is_frozen_in_part_equals_an_uninterrupted_one_bitwise(
    reports: list[dict[str, Any]], what: str, work: Path
) -> None:
    model, _, lists = FREEZING[what]
    ((option, patterns), *_) = lists
    for report in reports:
        found = report["frozen"][what]
        assert (found["read"], found["metrics"], found["digest"]) == (True, True, True)
        assert found.get("of another layout", True)
        assert "differs in whether model." in report["frozen"]["of other lists"]
    before = load_file(work / model / "model.safetensors")
    after = reports[0]["frozen"][what]["weights"]
    assert after.keys() == before.keys()
    for name, weights in after.items():
        named = any(re.search(pattern, name) for pattern in patterns)
        start = before[name].bfloat16().float() if "bfloat16" in what else before[name]
        assert torch.tensor(weights).equal(start) == (named == option.startswith("freeze")), name


def test_equal_states_are_equal_files(report: dict[str, Any]) -> None:
    first, second = report["saved again"]
    assert first == second
    assert {"00001-00000.part", "00001.index.json", "megatron_state.json"} <= first.keys()


def test_another_layout_reads_the_very_bits_and_goes_on_to_1e_5(report: dict[str, Any]) -> None:
    assert report["pipeline"]["read"] == report["tensor"]["saved"]
    for found, expected in zip(report["pipeline"]["resumed"], report["tensor"]["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)
    for source in LAYOUTS:
        assert report[source]["read by data"] == report[source]["older read by data"] == report[source]["saved"]
        for found, expected in zip(report[source]["metrics by data"], report[source]["metrics"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("optimizer", SUCCESSIONS)
def test_experts_in_one_place_or_over_ranks_read_each_others_bits_and_go_on_to_1e_5(
    report: dict[str, Any], optimizer: str
) -> None:
    found = report[optimizer]
    assert len(found["straight"]) == len(found["metrics"]) == 3
    assert found["read"] == found["saved"][:-1]
    for metrics, expected in zip(found["metrics"], found["straight"], strict=True):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_state_before_the_first_update_is_restored_too(report: dict[str, Any]) -> None:
    assert (report["tensor"]["first"], report["pipeline"]["first"]) == (0, 0)


def test_a_state_that_an_engine_cannot_take_is_refused_and_leaves_it_as_it_was(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert report["read without a distributed optimizer"] == report["tensor"]["saved"]
        assert "has a critic" in report["with a critic"]
        assert "has no critic" in report["without a critic"]
        assert report["untouched"] == report["plain"]
        assert report["after a refusal"] == "nothing"


def test_an_offloaded_engine_gives_its_weights_out_and_refuses_to_work(
    reports: list[dict[str, Any]],
) -> None:
    """That the updates after it end in the same bits is what the test of resumed runs shows."""
    for layout in ("tensor", "pipeline"):
        for found in (report[layout]["offloaded"] for report in reports):
            assert (found["digest"], found["given"], found["everywhere"]) == (True, True, [])
            assert found["refused"] == ["EngineError"] * 5
            assert found["names"] == reports[0][layout]["offloaded"]["names"] != []
            assert found["reference"]
            assert found["own_equal"]
        shares = [report[layout]["offloaded"]["own"] for report in reports]
        assert all(shares), "each rank gets some of the buckets that ranks take in turn"
        assert sorted(name for share in shares for name in share) == reports[0][layout]["offloaded"]["names"]


def test_a_teacher_of_another_family_scores_as_it_does_in_pytorch(reports: list[dict[str, Any]], work: Path) -> None:
    expected = make_engine(work / "teacher").score(BATCH, "actor")
    for report in reports:
        for found, values in zip(report["teacher"], expected, strict=True):
            np.testing.assert_allclose(found, values, atol=1e-5)


def test_save_names_every_file_on_rank_0_alone(reports: list[dict[str, Any]]) -> None:
    assert [report["tensor"]["whole"] for report in reports] == [True, False]
    assert reports[0]["tensor"]["files"] > 2 * 2


def test_a_save_that_one_rank_cannot_finish_fails_on_all_and_leaves_no_checkpoint(
    reports: list[dict[str, Any]],
) -> None:
    assert [report["failed save"] for report in reports] == ["EngineError", "StoreRefused"]
    assert not any(report["described"] for report in reports)


def test_a_batch_without_responses_has_empty_scores(report: dict[str, Any]) -> None:
    assert report["scored"] == [0, 0]


def test_refused_updates_change_nothing(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert (report["wrong version"], report["not finite"], report["unchanged"]) == (
            "WrongVersion",
            "NotFinite",
            True,
        )


def test_an_altered_or_missing_checkpoint_is_refused_by_all_ranks(reports: list[dict[str, Any]]) -> None:
    assert "Damaged" in {report["damaged"] for report in reports}
    assert all(report["damaged"] in ("Damaged", "EngineError") for report in reports)
    assert [report["missing"] for report in reports] == ["Damaged", "Damaged"]
    assert [report["after damage"] for report in reports] == ["EngineError", "EngineError"]


def test_one_process_makes_a_model_folder_of_any_checkpoint(report: dict[str, Any], work: Path) -> None:
    """Of a distributed optimizer, with a critic, with experts over ranks."""
    for checkpoint, source in (
        ("tensor-2", "tensor"),
        ("tensor-older", "tensor"),
        ("whole-3", "whole"),
        ("distributed-3", "distributed"),
    ):
        weights = load_file(work / checkpoint / "model.safetensors")
        assert weights_checksum(weights.items()) == report[source]["weights"]


def test_the_exported_folder_is_a_hugging_face_model(report: dict[str, Any], work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "exported", dtype="auto")
    weights = load_file(work / "model" / "model.safetensors")  # the exporting engine stood at the first weights
    assert {name for name, _ in model.named_parameters()} == set(weights)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
