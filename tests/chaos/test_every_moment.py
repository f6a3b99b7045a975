"""A driver that breaks off at every step and moment in turn, where there is much to bring back.

The run is the real one, steps and ledger and engines, but for Ray and Prefect: a driver is a call in this process that
an exception ends where a kill would, and the next one begins with what the store has, and every second time with the
engines of the one before, as on a cluster that was joined. Real processes are killed in test_matrix.py.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

import cairn.tasks.rollout
import cairn.tasks.streaming.engine_work
from cairn.configs.schema.run import RunConfig
from cairn.flows.orchestration.steps import Stopping
from cairn.flows.pipeline import Pipeline
from cairn.storage.commits import Commit, Step
from cairn.storage.ledger import Ledger
from cairn.storage.retention import retire
from cairn.storage.snapshots import Attempt
from cairn.storage.stream_log import StreamLog
from cairn.storage.write_ahead import WriteAhead
from cairn.tasks import recovery
from cairn.tasks.checkpoint import checkpoint_due
from cairn.tasks.halves import oldest_open, publish_for_open_halves
from cairn.tasks.step import DurableStep
from cairn.tasks.streaming.opening import open_stream
from tests.chaos.configurations import CONFIGURATIONS, write_config
from tests.chaos.driver import note_what_is_committed, note_what_is_generated
from tests.chaos.matrix import STEPS
from tests.chaos.oracle import differences
from tests.chaos.runs import Disturbed
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_context

MOMENTS = ("begun", "writing", "written", "committed", "appended", "loading", "replaying")
"""The attempt is there; its first file is about to be written; all are; its commit is; a group has gone into the log; a
checkpoint, a train step is about to be brought back."""


class Killed(BaseException):
    """The driver is no more."""


class Blows:
    """Ends drivers: each step at each moment once, spread over the iterations."""

    def __init__(self, patch: pytest.MonkeyPatch, iterations: int) -> None:
        self._iterations = iterations
        self.struck: list[tuple[str, str, int]] = []
        self.peace = False
        attempt, commit, retired_from = Ledger.attempt, Ledger.commit, WriteAhead.append
        newest_checkpoint, replay = recovery.newest_checkpoint, recovery.replay
        writers = {name: getattr(Attempt, name) for name in ("write_table", "adopt")}

        def beginning(ledger: Ledger, index: int, step: Step, shard: str | None = None) -> Attempt:
            made = attempt(ledger, index, step, shard)
            self.strike("begun", step, index)
            return made

        def committing(ledger: Ledger, **fields: Any) -> Commit:
            self.strike("written", fields["step"], fields["iteration"])
            made = commit(ledger, **fields)
            self.strike("committed", fields["step"], fields["iteration"])
            return made

        def writing(name: str) -> Callable[..., Any]:
            def write(made: Attempt, *args: Any) -> Any:
                self.strike("writing", made.step, made.iteration)
                return writers[name](made, *args)

            return write

        def appending(log: WriteAhead, *samples: Any) -> None:
            retired_from(log, *samples)
            self.strike("appended", log._attempt.step, log._attempt.iteration)

        def loading(ledger: Ledger, index: int) -> Commit | None:
            saved = newest_checkpoint(ledger, index)
            if saved is not None:
                self.strike("loading", Step.CHECKPOINT, saved.iteration)
            return saved

        def replaying(run: Any, committed: Commit) -> None:
            self.strike("replaying", Step.TRAIN, committed.iteration)
            replay(run, committed)

        patch.setattr(Ledger, "attempt", beginning)
        patch.setattr(Ledger, "commit", committing)
        patch.setattr(WriteAhead, "append", appending)
        patch.setattr(recovery, "newest_checkpoint", loading)
        patch.setattr(recovery, "replay", replaying)
        for name in writers:
            patch.setattr(Attempt, name, writing(name))

    def strike(self, moment: str, step: str, index: int) -> None:
        """End the driver, if the moment of this step has not done so yet and the run has come to its iteration."""
        turn = (*STEPS, Step.ADMIT).index(Step(step)) + MOMENTS.index(moment)
        done = self.peace or (moment, str(step)) in {blow[:2] for blow in self.struck}
        if not done and index >= turn % self._iterations - (moment in ("loading", "replaying")):
            self.struck.append((moment, str(step), index))
            raise Killed


def drive(store_url: str, config: RunConfig, fleet: LocalFleet | None) -> None:
    """A driver, from its oldest open half to the last iteration."""
    with tiny_context(store_url, config, fleet=fleet) as (run, _):

        def learned(index: int) -> None:
            if checkpoint_due(config, index):
                retire(run.ledger, config.checkpoint)

        publish_for_open_halves(run)
        pipeline = Pipeline(run, Ending(run), oldest_open(run.ledger), learned=learned, stop=run.stopping.set)
        streams = open_stream(run) if config.rollout.pipeline == "streaming" else nullcontext()
        with streams, closing(pipeline.run(pipeline.iterate, config.rollout.num_rollout)) as iterations:
            for _ in iterations:
                pass


class Ending(DirectSteps):
    """Begins no step once the driver ends: what was killed does nothing beside."""

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if self._run.stopping.is_set():
            raise Stopping
        return super().call(step, index, shard, *args, **kwargs)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For what tests.chaos.driver notes: put back afterwards."""
    monkeypatch.setattr(cairn.tasks.rollout, "generate_samples", cairn.tasks.rollout.generate_samples)
    monkeypatch.setattr(WriteAhead, "_write_part", WriteAhead._write_part)
    monkeypatch.setattr(
        cairn.tasks.streaming.engine_work, "generate_samples", cairn.tasks.streaming.engine_work.generate_samples
    )
    monkeypatch.setattr(StreamLog, "_write_samples", StreamLog._write_samples)
    monkeypatch.setattr(Ledger, "commit", Ledger.commit)
    return monkeypatch


@pytest.mark.slow
@pytest.mark.parametrize("configuration", ["mixed", "partial", "cut", "lagged", "streaming"])
def test_a_driver_that_breaks_off_everywhere_leaves_what_an_undisturbed_one_does(
    configuration: str, tiny_assets: Path, tmp_path: Path, noted: pytest.MonkeyPatch
) -> None:
    config_file = write_config(configuration, tiny_assets, tmp_path, tiny_assets)
    config = RunConfig.model_validate_json(config_file.read_text())
    run, twin = (Disturbed(tmp_path / name, config_file, {}, name="tiny") for name in ("struck", "twin"))
    for folder in (run.folder, twin.folder):
        folder.mkdir()
    repeatable = CONFIGURATIONS[configuration].repeatable
    if repeatable:
        drive(twin.store_url, config, LocalFleet(config))

    note_what_is_generated(run.folder / "generated.jsonl")
    note_what_is_committed(run.folder / "committed.jsonl")
    blows = Blows(noted, config.rollout.num_rollout)
    fleet = LocalFleet(config)
    while len(run.exits) < 100 and 0 not in run.exits:
        try:
            drive(run.store_url, config, fleet)
            run.exits.append(0)
        except Killed:
            run.exits.append(-9)
            if len(run.exits) % 2:
                fleet.close()
                fleet = LocalFleet(config)
    blows.peace = True
    assert run.exits[-1] == 0

    steps = {step for moment, step, _ in blows.struck if moment == "committed"}
    assert steps >= {"rollout", "reward", "filter", "advantage", "train", "checkpoint", "sync", "eval"}
    assert (Step.ADMIT in steps) == (configuration == "streaming")
    assert {moment for moment, _, _ in blows.struck} == set(MOMENTS)
    assert differences(run, twin if repeatable else None) == []
