"""Checkpoints, memory, conversion and rounding of models whose routers have biases, with actor and critic."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.architectures import architecture
from tests.engines.training.megatron.routed_cases import MODELS, launched
from tests.engines.training.ranks import run_megatron_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # the first test waits for the launch

BIAS = "e_score_correction_bias"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("routed")
    for name in MODELS:
        architecture(name).save(work / name)
    run_megatron_ranks(launched, work, world_size=2)
    return work


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def report(work: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((work / "report-0.json").read_text())[name]
    return found


def weights(work: Path, name: str, what: str) -> dict[str, torch.Tensor]:
    return load_file(work / f"{name} {what}.safetensors")


def test_a_bias_is_part_of_the_digest(report: dict[str, Any]) -> None:
    assert report["digest of moved biases"]


def test_every_layout_reads_the_bits_of_a_checkpoint_biases_included(
    report: dict[str, Any], work: Path, name: str
) -> None:
    published, saved = load_file(work / name / "model.safetensors"), weights(work, name, "saved")
    biases = [each for each in saved if each.endswith(BIAS)]
    assert len(biases) == (3 if name == "deepseek_v3" else 4)  # one layer is dense
    assert not any(saved[each].equal(published[each]) for each in biases)
    assert report["saved"] == report["read"] == report["read by another layout"] == report["onloaded"]
    assert report["saved"][1] == report["saved, checksum"] == report["offloaded, checksum"]


def test_a_resumed_run_equals_an_uninterrupted_one(report: dict[str, Any]) -> None:
    assert report["resumed bitwise"] == [True, True]
    assert report["metrics of another layout"] == pytest.approx(report["metrics"], rel=1e-4, abs=1e-5)


def test_no_update_changes_a_bias_and_every_update_all_else(work: Path, name: str) -> None:
    saved, ended = weights(work, name, "saved"), weights(work, name, "ended")
    same = {each for each, value in ended.items() if value.equal(saved[each])}
    assert same == {each for each in saved if each.endswith(BIAS)}


def test_a_model_folder_of_a_checkpoint_has_its_biases(work: Path, name: str) -> None:
    converted, saved = load_file(work / f"{name} converted" / "model.safetensors"), weights(work, name, "saved")
    assert converted.keys() == saved.keys()
    assert all(value.equal(saved[each]) for each, value in converted.items())


def test_a_bias_stays_in_float32_where_all_else_is_bfloat16(report: dict[str, Any], work: Path, name: str) -> None:
    exact, rounded = weights(work, name, "saved"), weights(work, name, "rounded")
    for each, value in rounded.items():
        assert value.dtype == (torch.float32 if each.endswith(BIAS) else torch.bfloat16), each
        assert not each.endswith(BIAS) or value.equal(exact[each]), each
    assert report["rounded"] == [report["rounded, checksum"]] * 2


def test_experts_are_trained_alone(work: Path, name: str) -> None:
    published, trained = load_file(work / name / "model.safetensors"), weights(work, name, "experts alone")
    changed = {each for each, value in trained.items() if not value.equal(published[each])}
    assert changed == {each for each in published if ".experts." in each or ".shared_experts." in each}
