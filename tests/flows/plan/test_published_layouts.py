"""Plans of layouts that are known to run on GPUs of 80 GB, and of some that are known not to."""

from dataclasses import replace

import pytest

from cairn.flows.plan.planning import plan_of
from cairn.flows.plan.subject import Plan, subject_of
from tests.flows.plan.layouts import LAYOUTS, NEED_OFFLOADING, Published


def planned(layout: Published, gpu: str = "h100") -> Plan:
    return plan_of(subject_of(layout.config, layout.script, gpu, memory_of_this_machine=64e9))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.script)
def test_what_is_known_to_run_fits(layout: Published) -> None:
    training, rollout, *_ = planned(layout).memory
    optimizer = sum(row.bytes for row in training.rows if row.what == "optimizer")
    assert training.total - optimizer * layout.offloaded <= training.capacity
    assert rollout.fits


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.script)
def test_the_rollout_engines_have_room_for_samples_of_the_longest_kind(layout: Published) -> None:
    cache = planned(layout).cache
    assert cache is not None
    assert cache.samples_longest >= layout.config.rollout.num_engines


@pytest.mark.parametrize("script", NEED_OFFLOADING)
def test_what_is_known_to_need_the_hosts_memory_does_not_fit_whole(script: str) -> None:
    training = planned(next(layout for layout in LAYOUTS if layout.script == script)).memory[0]
    assert not training.fits


def test_32768_tokens_fit_beside_30b_on_eight_gpus() -> None:
    layout = next(layout for layout in LAYOUTS if layout.script == "run-qwen3-30B-A3B")
    training = planned(replace(layout, max_tokens=32768)).memory[0]
    assert training.fits
    rows = {row.what: row.bytes for row in training.rows}
    own = 32768 * 151936 / 4 * 2  # logits in bfloat16 over four ranks
    assert rows["logits and the output layer's input"] == pytest.approx(own, rel=0.1)


@pytest.mark.parametrize("model", ["Qwen3-32B", "Llama-3.1-70B"])
def test_a_large_model_does_not_fit_a_layout_of_4b(model: str) -> None:
    layout = Published("too big", model, 8, {"tensor_model_parallel_size": 2}, 9216, 2, (32, 8), 8192)
    training, rollout, *_ = planned(layout).memory
    assert not training.fits
    assert rollout.fits == (model == "Qwen3-32B")  # 66 GB on two GPUs
