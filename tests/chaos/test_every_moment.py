"""A driver that breaks off at every step and moment in turn, where there is much to bring back.

A driver is a call in this process (tests/chaos/in_process.py) that an exception ends where a kill would. The next one
begins with what the store has, and every second time with the engines of the one before, as on a cluster that was
joined. Real processes are killed in test_matrix.py.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cairn.tasks.generation.rollout
import cairn.tasks.streaming.engine_work
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.logs.sample_log import SampleLog
from cairn.tasks.trainer import recovery
from tests.chaos.configurations import CONFIGURATIONS, write_config
from tests.chaos.driver import note_what_is_committed, note_what_is_generated
from tests.chaos.in_process import Killed, drive_whole, undisturbed
from tests.chaos.matrix import STEPS
from tests.chaos.oracle import differences
from tests.chaos.runs import Disturbed
from tests.local_fleet import LocalFleet

MOMENTS = ("begun", "writing", "written", "committed", "appended", "loading", "replaying")
"""The attempt is there; its first file is about to be written; all are; its commit is; a group has gone into the log; a
checkpoint, a train step is about to be brought back."""


class Blows:
    """Ends drivers: each step at each moment once, spread over the iterations."""

    def __init__(self, patch: pytest.MonkeyPatch, iterations: int) -> None:
        self._iterations = iterations
        self.struck: list[tuple[str, str, int]] = []
        self.peace = False
        begin, commit, append = Ledger.attempt, Ledger.commit, SampleLog.append
        newest_checkpoint, replay = recovery.newest_checkpoint, recovery.replay
        writers = {name: getattr(Attempt, name) for name in ("write_table", "adopt")}

        def beginning(ledger: Ledger, index: int, step: Step, shard: str | None = None) -> Attempt:
            made = begin(ledger, index, step, shard)
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

        def appending(log: SampleLog, *samples: Any, **options: Any) -> None:
            append(log, *samples, **options)
            if isinstance(attempt := log._attempt, Attempt):  # and no stream's
                self.strike("appended", attempt.step, attempt.iteration)

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
        patch.setattr(SampleLog, "append", appending)
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


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For what tests.chaos.driver notes: put back afterwards."""
    monkeypatch.setattr(cairn.tasks.generation.rollout, "generate_shard", cairn.tasks.generation.rollout.generate_shard)
    monkeypatch.setattr(SampleLog, "_write_part", SampleLog._write_part)
    monkeypatch.setattr(RolloutHandle, "keep", RolloutHandle.keep)
    monkeypatch.setattr(
        cairn.tasks.streaming.engine_work, "generate_samples", cairn.tasks.streaming.engine_work.generate_samples
    )
    monkeypatch.setattr(Ledger, "commit", Ledger.commit)
    return monkeypatch


@pytest.mark.proof
@pytest.mark.parametrize(
    "configuration", ["mixed", "partial", pytest.param("cut", marks=pytest.mark.slow), "lagged", "streaming"]
)
def test_a_driver_that_breaks_off_everywhere_leaves_what_an_undisturbed_one_does(
    configuration: str, tiny_assets: Path, tmp_path: Path, noted: pytest.MonkeyPatch
) -> None:
    config_file = write_config(configuration, tiny_assets, tmp_path, tiny_assets)
    run = Disturbed(tmp_path / "struck", config_file, {})
    run.folder.mkdir()
    twin = undisturbed(tmp_path / "twin", config_file) if CONFIGURATIONS[configuration].repeatable else None

    note_what_is_generated(run.folder / "generated.jsonl")
    note_what_is_committed(run.folder / "committed.jsonl")
    blows = Blows(noted, run.config.rollout.num_rollout)
    fleet = LocalFleet(run.config)
    while len(run.exits) < 100 and 0 not in run.exits:
        try:
            drive_whole(run, fleet)
            run.exits.append(0)
        except Killed:
            run.exits.append(-9)
            struck = {(moment, step) for moment, step, _ in blows.struck}
            loads = ("committed", "checkpoint") in struck and ("loading", "checkpoint") not in struck
            if len(run.exits) % 2 or loads:
                fleet.close()
                fleet = LocalFleet(run.config)
    blows.peace = True
    assert run.exits[-1] == 0

    steps = {step for moment, step, _ in blows.struck if moment == "committed"}
    assert steps >= {"rollout", "reward", "filter", "advantage", "train", "checkpoint", "sync", "eval"}
    assert (Step.ADMIT in steps) == (configuration == "streaming")
    assert {moment for moment, _, _ in blows.struck} == set(MOMENTS)
    assert differences(run, twin) == []
