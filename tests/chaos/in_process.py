"""Drivers within the test's own process: the real steps, ledger and engines, without Ray and Prefect.

A run without faults ends in the same bits here as with drivers of its own, in a tenth of the time.
"""

from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from cairn.flows.events import Stopping
from cairn.flows.pipeline import Pipeline
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.upkeep.retention import retire
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.halves import oldest_open, publish_for_open_halves
from cairn.tasks.streaming.opening import open_stream
from cairn.tasks.trainer.checkpoint import checkpoint_due
from tests.chaos.runs import Disturbed
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_context


class Killed(BaseException):
    """The driver is no more."""


def be_killed() -> None:
    """End this process's driver where SIGKILL would end one of its own."""
    raise Killed


class EndingAt(DirectSteps):
    """Ends the driver before, or after, one of its steps."""

    def __init__(
        self, run: RunContext, index: int, step: Step, moment: str, end: Callable[[], None] = be_killed
    ) -> None:
        super().__init__(run)
        self._place, self._moment, self._end = (index, step), moment, end

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if (index, step.name) == self._place and self._moment == "before":
            self._end()
        commit = super().call(step, index, shard, *args, **kwargs)
        if (index, step.name) == self._place:
            self._end()
        return commit


class StoppingSteps(DirectSteps):
    """Begins no step once the driver ends, as a killed driver does."""

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if self._run.stopping.is_set():
            raise Stopping
        return super().call(step, index, shard, *args, **kwargs)


def drive(run: RunContext, steps: DirectSteps | None = None) -> list[int]:
    """A driver from the run's oldest open half to its last iteration; returns the iterations that it learned from."""

    def learned(index: int) -> None:
        if checkpoint_due(run.config, index):
            retire(run.ledger, run.config.checkpoint)

    publish_for_open_halves(run)
    pipeline = Pipeline(
        run, steps or StoppingSteps(run), oldest_open(run.ledger), learned=learned, stop=run.stopping.set
    )
    streams = open_stream(run) if run.config.rollout.pipeline == "streaming" else nullcontext()
    with streams, closing(pipeline.run(pipeline.iterate, run.config.rollout.num_rollout)) as iterations:
        return [index for index, _ in iterations]


def drive_whole(run: Disturbed, fleet: LocalFleet | None = None) -> None:
    """A driver of the run, on the engines of an earlier one if a fleet is given."""
    with tiny_context(run.store_url, run.config, run.name, fleet=fleet) as (context, _):
        drive(context)


def undisturbed(folder: Path, config_file: Path, name: str = "run") -> Disturbed:
    """A run in a folder of its own that nobody strikes, at its end."""
    run = Disturbed(folder, config_file, {}, name=name)
    drive_whole(run)
    return run
