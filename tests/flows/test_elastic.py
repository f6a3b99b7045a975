"""Rollout engines that join and leave a run that streams, with the machines of its Ray cluster."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.types.trajectories import SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.upkeep.verification import verify
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.streaming.stream import Stream
from cairn.tasks.trainer.recovery import restore_trainer
from tests.chaos.in_process import drive
from tests.engines.fleet import simulated_machines
from tests.flows.test_streaming import ITERATIONS, streaming
from tests.forks import FORKS, set_environment
from tests.tiny_run import DirectSteps, tiny_context
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOM = {"num_cpus_per_engine": 3, "num_cpus_per_rank": 1, "start_timeout": 240, "call_timeout": 60}
"""For one engine on a machine of 4 CPUs."""


class Between(DirectSteps):
    """Does something before some of its steps."""

    def __init__(self, run: RunContext, before: dict[tuple[int, Step], Callable[[], None]]) -> None:
        super().__init__(run)
        self._before = before

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        self._before.pop((index, step.name), lambda: None)()
        return super().call(step, index, shard, *args, **kwargs)


def drive_while_machines_come_and_go(
    store: str, config: RunConfig, parent: Connection, environment: dict[str, str]
) -> None:
    """A driver, which says when a machine is to come, and when it is to go. `environment`: how Ray lets it in, whatever
    its process was forked from."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH_")}
    set_environment({**others, **environment})
    with (
        Fleet.start(config, name="elastic", total_steps=ITERATIONS, report=parent.send) as fleet,
        tiny_context(store, config, fleet=fleet) as (run, _),  # type: ignore[arg-type]
    ):
        staying, coming = fleet.rollout
        requested_again, ended_by = record_requests(fleet.rollout)
        pids: list[int] = []

        def join() -> None:
            assert fleet.membership.members == [staying]
            parent.send("come")
            wait_for(lambda: fleet.membership.members == [staying, coming], 240)

        def stop() -> None:
            """It has work of the iteration before, and is to be at work when its machine goes."""
            wait_for(lambda: ended_by[coming.name], 240)
            pids.append(coming.health()["pid"])
            os.kill(pids[0], signal.SIGSTOP)

        def leave() -> None:
            stream = run.attached(Stream)
            assert stream is not None
            wait_for(lambda: stream._engines[1]._groups, 240)
            parent.send("go")

        drive(run, Between(run, {(1, Step.ROLLOUT): join, (4, Step.ADMIT): stop, (4, Step.ROLLOUT): leave}))
        assert fleet.membership.members == [staying]
        with suppress(ProcessLookupError):  # Ray may have ended it
            os.kill(pids[0], signal.SIGKILL)
        assert not requested_again, "what had ended was generated again"
    with Fleet.start(config, name="replaying", total_steps=ITERATIONS, trains_only=True) as fleet:
        assert not fleet.rollout
    parent.send("done")


def record_requests(engines: Sequence[RolloutHandle]) -> tuple[list[SampleKey], Counter[str]]:
    """Samples that are asked for when they have ended, and how many each engine ended, from now on."""
    ended, repeated, ended_by = set[SampleKey](), list[SampleKey](), Counter[str]()

    def watch(engine: RolloutHandle) -> None:
        generate, join = engine.generate_samples, engine.join

        def generating(samples: Sequence[SampleRequest], *args: Any) -> Iterator[Any]:
            repeated.extend(sample.key for sample in samples if sample.key in ended)
            for batch in generate(samples, *args):
                keys = [sample.key for sample in batch if sample.finish_reason != FinishReason.ABORT]
                ended.update(keys)
                ended_by[engine.name] += len(keys)
                yield batch

        def joining(samples: Sequence[SampleRequest]) -> bool:
            repeated.extend(sample.key for sample in samples if sample.key in ended)
            return join(samples)

        engine.generate_samples, engine.join = generating, joining  # type: ignore[method-assign]

    for engine in engines:
        watch(engine)
    return repeated, ended_by


def test_an_engine_gets_work_when_its_machine_comes_and_leaves_it_to_others_when_it_goes(
    tiny_assets: Path, tmp_path: Path
) -> None:
    messages: list[str] = []
    with simulated_machines.simulated_machines() as machines:
        machines.have([1])
        fleet = {**ROOM, "ray_address": machines.do(simulated_machines.address)}
        way_in = machines.do(simulated_machines.way_in)
        config = streaming(tiny_assets, 1, fleet=fleet)
        elastic = {"num_engines": 2, "min_num_engines": 1}
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update=elastic)})
        here, there = FORKS.Pipe()
        driver = FORKS.Process(target=drive_while_machines_come_and_go, args=(str(tmp_path), config, there, way_in))
        driver.start()
        there.close()
        while not messages or messages[-1] != "done":
            messages.append(here.recv())
            if messages[-1] == "come":
                machines.do(simulated_machines.add, 1)
            elif messages[-1] == "go":
                machines.do(simulated_machines.lose_newest)
        driver.join(60)
        assert driver.exitcode == 0
    joined, left = (one for one in messages if " joins. " in one or " leaves: " in one)
    assert joined == "Engine rollout:1 joins. 2 of 2 rollout engines serve"
    assert left.startswith("Engine rollout:1 leaves: ")
    assert left.endswith(" 1 of 2 rollout engines serve")
    with tiny_context(str(tmp_path), config) as (run, _):
        takes = [run.committed(index, Step.ROLLOUT, "00-000") for index in range(ITERATIONS)]
        assert sorted(chain(*(take.values["groups"] for take in takes))) == list(range(2 * ITERATIONS))
        by = {row["engine"] for take in takes for row in run.read(take).to_pylist()}
        assert by == {"rollout:0", "rollout:1"}
        assert takes[0].metrics["engines"] == 1
        assert not [finding for found in verify(run.ledger) for finding in found.findings]
        restore_trainer(run, run.committed(ITERATIONS - 1, Step.TRAIN))
