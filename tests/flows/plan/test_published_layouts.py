"""Plans of layouts that are known to run on GPUs of 80 GB, and of some that are known not to."""

from dataclasses import replace
from typing import Any

import pytest

from cairn.flows.plan.planning import plan_of
from cairn.flows.plan.subject import Plan, subject_of
from tests.flows.plan.layouts import LAYOUTS, NEED_OFFLOADING, Published


def planned(layout: Published, gpu: str = "h100") -> Plan:
    return plan_of(subject_of(layout.config, layout.script, gpu, memory_of_this_machine=64e9))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.script)
def test_what_is_known_to_run_fits(layout: Published) -> None:
    assert all(memory.fits for memory in planned(layout).memory)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.script)
def test_the_rollout_engines_have_room_for_samples_of_the_longest_kind(layout: Published) -> None:
    cache = planned(layout).cache
    assert cache is not None
    assert cache.samples_longest >= layout.config.rollout.num_engines


@pytest.mark.parametrize("script", NEED_OFFLOADING)
def test_what_is_known_to_need_the_hosts_memory_does_not_fit_whole(script: str) -> None:
    layout = next(layout for layout in LAYOUTS if layout.script == script)
    assert not planned(replace(layout, offloaded=False)).memory[0].fits


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_an_optimizer_on_the_host_takes_12_bytes_a_parameter_there_and_its_gradients_4(share: float) -> None:
    layout = next(layout for layout in LAYOUTS if layout.script == "run-qwen3-32B")
    plan = planned(replace(layout, megatron={**layout.megatron, "optimizer_offload_fraction": share}))
    training, _, host = plan.memory
    sizes = {row.what: row.bytes for row in host.rows}
    parameters = plan.model.parameters
    assert sizes["optimizer"] == pytest.approx(12 * share * parameters, rel=0.01)
    assert sizes["gradients for the optimizer"] == pytest.approx(4 * share * parameters, rel=0.01)
    # 8 ranks of one machine hold everything once. All of them write 12 bytes a parameter into a checkpoint.
    assert sizes["a copy of the state while it is written"] == pytest.approx(12 * parameters, rel=0.01)
    (on_gpu,) = (row.bytes for row in training.rows if row.what == "optimizer")
    assert 8 * on_gpu == pytest.approx(12 * (1 - share) * parameters, rel=0.01)


def test_stored_weights_are_divided_over_the_machines_that_train_and_each_server_of_a_machine_has_a_copy() -> None:
    layout = next(layout for layout in LAYOUTS if layout.script == "run-qwen3-30B-A3B")
    subject = subject_of(layout.config, layout.script, "h100", memory_of_this_machine=64e9)

    def held(**sections: dict[str, Any]) -> dict[str, float]:
        """Copies of the weights in bfloat16 on a machine, by what they are for."""
        changed = {name: getattr(subject.config, name).model_copy(update=own) for name, own in sections.items()}
        plan = plan_of(replace(subject, config=subject.config.model_copy(update=changed)))
        whole = 2 * plan.model.parameters
        return {row.what.split()[1]: row.bytes / whole for row in plan.memory[-1].rows if "stored weights" in row.what}

    assert held(checkpoint={"store_weights": False}) == {}
    assert held() == {"last": 2}
    assert held(training={"world_size": 32}) == {"last": pytest.approx(2 / 4)}
    assert held(rollout={"dtype": "float32"}) == {"last": 4}
    two_a_machine = {"num_gpus_per_engine": 4, "num_engines": 5}
    assert held(fleet={"update_weight_transport": "store"}, rollout=two_a_machine) == {"last": 2, "engines'": 2}


def test_pinned_copies_take_powers_of_two() -> None:
    layout = next(layout for layout in LAYOUTS if layout.script == "run-qwen3-32B")
    host = planned(replace(layout, offloaded=False)).memory[-1]
    sizes = {row.what: row.bytes for row in host.rows}
    held = sizes["training state while others have the GPUs"]
    assert held == pytest.approx(14 * 32.76e9, rel=0.01)  # 2 of weights, 12 of the optimizer
    assert 0 < sizes["pinned memory, rounded up to powers of two"] < held


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
