"""Training and rollout in turn: the order in which memory changes hands, and that nothing else changes."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.types.errors import EngineError
from tests.fleets import versions
from tests.tasks.test_iteration import run_iterations
from tests.tiny_run import tiny_config

SHARED = {"colocate": True, "start_timeout": 240, "call_timeout": 60}
ROUND = [
    "generate",
    "rollout gave kv_cache weights",
    "training took",
    "train",
    "save",
    "publish",
    "training gave",
    "rollout took weights",
    "rollout took kv_cache",
]


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    """With a critic, which gives and takes memory with the actor."""
    algorithm = {"use_rollout_logprobs": True, "advantage_estimator": "ppo"}
    return tiny_config(tiny_assets, fleet=SHARED, checkpoint={"save_interval": 1}, algorithm=algorithm)


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    apart = config.model_copy(update={"fleet": config.fleet.model_copy(update={"colocate": False})})
    return run_iterations(tmp_path_factory.mktemp("apart"), apart, 3)


@pytest.fixture
def fleet(config: RunConfig, ray_cluster: Cluster) -> Iterator[Fleet]:
    with Fleet.start(config, name="colocated", total_steps=3) as fleet:
        yield fleet


class Record(list[str]):
    """What engines did, and which memory they said to have given or taken, call by call."""

    def __init__(self, fleet: Fleet, patch: pytest.MonkeyPatch) -> None:
        self._fleet, self._had = fleet, self._asleep(fleet)
        for engine, method, work in (
            (fleet.rollout[0], "keep", "generate"),
            (fleet.rollout[0], "release_memory", None),
            (fleet.rollout[0], "resume_memory", None),
            (fleet.training, "offload", None),
            (fleet.training, "onload", None),
            (fleet.training, "train", "train"),
            (fleet.training, "copy_state", "save"),
            (fleet.training, "export_weights", "publish"),
        ):
            patch.setattr(engine, method, self._recorded(getattr(engine, method), work))

    def _recorded(self, call: Callable[..., Any], work: str | None) -> Callable[..., Any]:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if work is not None and self[-1:] != [work]:
                self.append(work)
            result = call(*args, **kwargs)
            self._compare()
            return result

        return recorded

    def _compare(self) -> None:
        had, self._had = self._had, self._asleep(self._fleet)
        for who, before, after in zip(("training", "rollout"), had, self._had, strict=True):
            for verb, changed in (("gave", after - before), ("took", before - after)):
                if changed:
                    self.append(" ".join([who, verb, *sorted(changed - {""})]))

    @staticmethod
    def _asleep(fleet: Fleet) -> tuple[set[str], set[str]]:
        return {""} if fleet.training.health()["offloaded"] else set(), set(fleet.rollout[0].health()["released"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_memory_changes_hands_in_slimes_order_and_the_weights_are_those_of_engines_apart(
    config: RunConfig, fleet: Fleet, undisturbed: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fleet.training.health()["offloaded"]  # before servers took what memory was free
    record = Record(fleet, monkeypatch)
    assert run_iterations(tmp_path, config, 3, fleet) == undisturbed  # type: ignore[arg-type]
    assert record == (ROUND * 3)[:-3]  # nobody asks for the last weights


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whatever_a_crash_left_asleep_is_found_and_woken(
    config: RunConfig, fleet: Fleet, undisturbed: list[str | None], tmp_path: Path
) -> None:
    def run(count: int) -> bool:
        return run_iterations(tmp_path, config, count, fleet) == undisturbed[:count]  # type: ignore[arg-type]

    assert run(1)
    fleet.turns.for_training()  # the driver died while training had the memory
    with pytest.raises(EngineError, match="memory was released"):
        list(fleet.rollout[0].generate([]))
    assert versions(fleet) == [None]
    assert run(2)
    fleet.turns.release_rollout()
    fleet.turns.for_update(fleet.rollout[:1])  # and here with the weights' memory resumed and nothing in it
    with pytest.raises(EngineError, match="memory was released"):
        list(fleet.rollout[0].generate([]))
    with pytest.raises(EngineError, match="offloaded: onload it first"):
        fleet.training.save(str(tmp_path), "nowhere")
    os.kill(fleet.training.health()["pid"], signal.SIGKILL)
    assert run(3)
