"""Megatron's optimizer in the host's memory: its state is in digest and checkpoint, on two ranks.

On a CPU both memories are the host's: what is shown is which values go where, not that copies overlap with work or
that a GPU's memory becomes free.
"""

import json
from typing import Any

import pytest

from tests.engines.training.builders import model_folder
from tests.engines.training.megatron.host_optimizer_cases import LAYOUTS, launched
from tests.engines.training.ranks import run_megatron_ranks

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]  # the first test waits for all launches


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Report of rank 0, by launch; every launch is of new processes."""
    work = tmp_path_factory.mktemp("host")
    model_folder(work / "model")
    model_folder(work / "experts", "qwen3_moe")
    run_megatron_ranks(launched, work, "trained", world_size=2)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        run_megatron_ranks(launched, work, "killed", world_size=2)
    assert any(work.glob("dies-*"))
    run_megatron_ranks(launched, work, "resumed", world_size=2)
    return {name: json.loads((work / f"{name}-0.json").read_text()) for name in ("trained", "resumed")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_that_was_killed_ends_in_the_same_bits(reports: dict[str, Any], layout: str) -> None:
    trained, resumed = reports["trained"][layout], reports["resumed"][layout]
    assert len({trained["first"], trained["saved"], trained["ended"]}) == 3
    assert resumed == {"read": trained["saved"], "metrics": trained["metrics"], "ended": trained["ended"]}


def test_how_much_is_on_the_host_does_not_change_the_state(reports: dict[str, Any]) -> None:
    trained = reports["trained"]
    for what in ("first", "saved", "ended"):
        assert trained["all"][what] == trained["overlap"][what] == trained["half"][what]


def test_the_host_updates_like_the_device(reports: dict[str, Any]) -> None:
    trained = reports["trained"]
    assert trained["on the device"]["first"] == trained["all"]["first"]
    assert trained["difference"].keys() == {"parameters.", "exp_avg.", "exp_avg_sq."}
    assert max(trained["difference"].values()) < 1e-2


def test_host_and_device_read_each_others_checkpoints(reports: dict[str, Any]) -> None:
    trained = reports["trained"]
    assert trained["all"]["read on the device"] == trained["all"]["saved"]
    assert reports["resumed"]["read from the device"] == trained["on the device"]["saved"]


def test_a_loaded_state_takes_no_more_memory_than_its_elements(reports: dict[str, Any]) -> None:
    resumed = reports["resumed"]
    assert resumed["bytes"] <= 4 * resumed["elements"] + 4096
