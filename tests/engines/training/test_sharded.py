import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.weights.fingerprint import weights_checksum
from cairn.storage.opening import open_store
from tests.engines.training.algorithms import ALGORITHMS
from tests.engines.training.builders import make_engine, model_folder
from tests.engines.training.ranks import run_ranks
from tests.engines.training.sharded_cases import ALGORITHM, CLIP, FROZEN, OF_WHOLE_STEPS, PPO, launched, run_cases

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]  # the first test waits for the launch

Report = dict[str, Any]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def folder(work: Path) -> Path:
    return model_folder(work / "model")


@pytest.fixture(scope="module")
def one(folder: Path, work: Path) -> Report:
    threads = torch.get_num_threads()
    report = run_cases(folder, work, 0, 1)
    torch.set_num_threads(threads)
    return report


@pytest.fixture(scope="module")
def both(one: Report, folder: Path, work: Path) -> list[Report]:
    run_ranks(launched, 2, folder, work, world_size=2)
    return [json.loads((work / f"report-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def two(both: list[Report]) -> Report:
    return both[0]


def test_five_clipped_updates_end_in_the_weights_of_one_rank(one: Report, two: Report) -> None:
    assert min(metrics["grad_norm"] for metrics in one["metrics"]) > CLIP  # every update was clipped
    for name, expected in one["weights"].items():
        np.testing.assert_allclose(two["weights"][name], expected, atol=1e-5, rtol=0, err_msg=name)


def test_a_loss_of_sequences_from_outside_the_tree_is_that_of_one_rank(one: Report, two: Report) -> None:
    assert two["loss of sequences"] == pytest.approx(one["loss of sequences"], rel=1e-4, abs=1e-6)
    for name, expected in one["weights after it"].items():
        np.testing.assert_allclose(two["weights after it"][name], expected, atol=1e-5, rtol=0, err_msg=name)


def test_two_ranks_leave_what_is_frozen_as_it_is_and_train_the_rest_as_one(
    one: Report, two: Report, folder: Path
) -> None:
    before = dict(load_causal_lm(folder, torch.float32).named_parameters())
    for name, weights in two["frozen weights"].items():
        frozen = any(re.search(pattern, name) for pattern in FROZEN)
        assert torch.tensor(weights).equal(before[name]) == frozen, name
        np.testing.assert_allclose(weights, one["frozen weights"][name], atol=1e-5, rtol=0, err_msg=name)


def test_a_batch_that_each_rank_reads_its_part_of_gives_the_same_bits(one: Report, both: list[Report]) -> None:
    for name in ("plain", *OF_WHOLE_STEPS):
        for report in (one, *both):
            whole, parts = report[f"from parts: {name}"]
            assert whole == parts, name
    for report in (one, both[0]):
        expected, found = report["scored from parts"]
        assert expected == found


def test_losses_and_metrics_are_those_of_one_rank_though_micro_batches_are_uneven(one: Report, two: Report) -> None:
    for expected, found in zip(one["metrics"], two["metrics"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for case in ("per token", "frozen", "recomputed", "single sample", *ALGORITHMS):
        assert two[case] == pytest.approx(one[case], rel=1e-4, abs=1e-6)
    assert two["bfloat16"]["loss"] == pytest.approx(one["bfloat16"]["loss"], rel=1e-2)
    assert two["bfloat16"]["grad_norm"] == pytest.approx(one["bfloat16"]["grad_norm"], rel=1e-2)


def test_updates_on_the_host_are_those_on_the_device_bit_for_bit(one: Report, two: Report) -> None:
    for report in (one, two):
        assert report["on the host"] == report["fused"]
        assert report["host's saved digest"] == report["fused digest"]
        for expected, found in zip(report["metrics"], report["fused"], strict=False):
            assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_checkpoint_of_the_host_continues_in_equal_bits_and_loads_without_it(
    one: Report, two: Report, folder: Path, work: Path
) -> None:
    for report in (one, two):
        assert report["host's next again"] == report["host's next"]
    engine = make_engine(folder, algorithm=ALGORITHM)
    engine.load(open_store(str(work / "store")), "host-2")
    assert engine.position().state_digest == two["host's saved digest"]


def test_ranks_agree_on_everything_they_report(both: list[Report]) -> None:
    first, second = both
    differing = {name for name in first if first[name] != second[name]}
    exported = {"weights", "weights after it", "frozen weights", "checksum of sent experts"}  # by rank 0 alone
    assert differing == {*exported, "scored from parts", "failed save"}


def test_digest_and_checksum_of_equal_bits_do_not_depend_on_the_layout(one: Report, two: Report) -> None:
    assert two["initial digest"] == one["initial digest"]
    assert two["initial checksums"] == one["initial checksums"]
    assert two["checksums of experts"] == one["checksums of experts"]
    for report in (one, two):
        assert report["checksum of sent experts"] == report["checksums of experts"][0]


def test_every_rank_gets_the_teachers_most_probable_tokens(one: Report, two: Report) -> None:
    for found, expected in zip(two["teacher's rows"], one["teacher's rows"], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def test_every_rank_gets_all_scores(one: Report, two: Report) -> None:
    for found, expected in zip(two["scores"], one["scores"], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(two["one score"], one["one score"], atol=1e-5)


def test_a_checkpoint_of_two_ranks_loads_on_one_and_back(one: Report, two: Report, folder: Path, work: Path) -> None:
    engine = make_engine(folder, algorithm=ALGORITHM)
    engine.load(open_store(str(work / "store")), "ranks-2")
    assert engine.position().state_digest == two["saved digest"]
    assert two["digest loaded from one rank"] == one["saved digest"]


def test_a_failed_save_and_a_refused_update_fail_on_all_ranks_and_change_nothing(both: list[Report]) -> None:
    assert [report["failed save"] for report in both] == ["StoreRefused", "EngineError"]
    for report in both:
        assert report["not finite"] == "NotFinite"
        assert report["digest after failures"] == report["saved digest"]


def test_the_model_folder_written_by_two_ranks_loads(two: Report, folder: Path, work: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(work / "hf-2", dtype="auto")
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    weights = {name: torch.tensor(values) for name, values in two["weights"].items()}
    assert weights_checksum(model.named_parameters()) == weights_checksum(weights.items())


def test_all_ranks_compute_the_gradients_of_a_batch_twice_and_get_the_same_bits(both: list[Report]) -> None:
    for report in both:
        (first, second), (of_another, _) = report["gradient digests"]
        assert first == second != of_another


def test_a_critic_over_two_ranks_is_that_of_one(one: Report, two: Report, folder: Path, work: Path) -> None:
    assert two["critic's initial digest"] == one["critic's initial digest"]
    assert two["critic's metrics"] == pytest.approx(one["critic's metrics"], rel=1e-4, abs=1e-6)
    for found, expected in zip(two["values"], one["values"], strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4)
    engine = make_engine(folder, algorithm=PPO)
    engine.load(open_store(str(work / "store")), "critic-2")
    assert engine.position().state_digest == two["critic's digest"]
