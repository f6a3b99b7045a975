"""Runs that stream: what a batch is made of is decided by commits, and survives the driver."""

import os
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.membership import Membership
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.rollout.transformers.loop import DecodeLoop
from cairn.engines.types.errors import EngineDied, EngineError
from cairn.engines.types.trajectories import FIRST_CALL, GeneratedSample, SampleRequest, Segment, Trajectory
from cairn.engines.types.types import FinishReason
from cairn.flows.history.replay import Replaying, _EndOfLedger, _walk
from cairn.flows.iteration import collect, learn
from cairn.flows.reading.metrics import iteration_metrics
from cairn.flows.streaming import admit_prompts
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import Status
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreError
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import find_selection
from cairn.tasks.durable.step import DurableStep, StepCall
from cairn.tasks.generation.groups import Group
from cairn.tasks.halves import publish_for_open_halves, weights_after
from cairn.tasks.streaming.opening import open_stream
from cairn.tasks.streaming.stream import Stream, Taken, admit, admitted_groups
from cairn.tasks.streaming.take import encode_rows
from cairn.tasks.trainer.recovery import restore_trainer
from tests.chaos.in_process import EndingAt, drive
from tests.forks import FORKS
from tests.local_fleet import LocalFleet
from tests.tiers import led_by
from tests.tiny_run import DirectSteps, tiny_config, tiny_context
from tests.waiting import wait_for

ITERATIONS = 5


def streaming(assets: Path, max_age: int, **sections: dict[str, Any]) -> RunConfig:
    rollout = {
        "num_rollout": ITERATIONS,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8,
        "pipeline": "streaming",
        "max_age": max_age,
    }
    return tiny_config(assets, rollout=rollout, **sections)


@pytest.mark.parametrize("max_age", [1, 2])
def test_every_admitted_group_is_taken_once_and_trained_on_no_older_than_may_be(
    max_age: int, tiny_assets: Path, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, max_age)) as (run, _):
        assert drive(run, DirectSteps(run)) == list(range(ITERATIONS))
        admitted = [run.committed(index, Step.ADMIT, "00").values["groups"] for index in range(ITERATIONS)]
        assert list(chain(*admitted)) == list(range(2 * ITERATIONS))
        taken = [run.committed(index, Step.ROLLOUT, "00-000").values["groups"] for index in range(ITERATIONS)]
        assert sorted(chain(*taken)) == list(range(2 * ITERATIONS))
        for index in range(ITERATIONS):
            assert run.committed(index, Step.ADVANTAGE).metrics["age/max"] <= max_age
            assert run.committed(index, Step.TRAIN).weight_version_in == index


def versions_of(run: RunContext, index: int) -> set[int]:
    """Under which weights the tokens of a batch were sampled."""
    rows = run.read(run.committed(index, Step.ROLLOUT, "00-000")).to_pylist()
    return {version for row in rows for version in row["weight_versions"]}


class LearningSlowly(DirectSteps):
    """Trains on nothing before the next batch is there."""

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        if step.name is Step.TRAIN and index + 1 < ITERATIONS:
            wait_for(lambda: find_selection(self._run, index + 1) is not None, 60)
        return super().call(step, index, shard, *args, **kwargs)


def test_where_learning_waits_for_nothing_samples_are_as_young_as_the_batch_before_allows(
    tiny_assets: Path, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 4)) as (run, _):
        drive(run, LearningSlowly(run))
        ages = [run.committed(index, Step.ADVANTAGE).metrics["age/max"] for index in range(ITERATIONS)]
        assert ages[3:] == [1, 1], "4 are allowed, and 1 is enough"


def test_engines_take_new_weights_after_so_many_iterations(tiny_assets: Path, tmp_path: Path) -> None:
    config = streaming(tiny_assets, 2)
    rollout = config.rollout.model_copy(update={"update_weights_interval": 2})
    with tiny_context(str(tmp_path), config.model_copy(update={"rollout": rollout})) as (run, _):
        drive(run, DirectSteps(run))
        versions = [versions_of(run, index) for index in range(ITERATIONS)]
        assert set().union(*versions) <= {0, 2, 4}
        assert all(index - min(found) <= 2 for index, found in enumerate(versions))
        assert max(versions[-1]) >= 2, "they never had other weights"


def be_killed(store: str, config: RunConfig, index: int, step: Step, moment: str) -> None:
    with tiny_context(store, config) as (run, _):

        def logged() -> bool:
            with suppress(FileNotFoundError):  # it was removed meanwhile
                return any(group not in taken_groups(run) for group, _ in rows_that_ended(Path(store)))
            return False

        def die() -> None:
            if (step, moment) == (Step.ROLLOUT, "before"):
                wait_for(logged, 60)
            os.kill(os.getpid(), signal.SIGKILL)

        drive(run, EndingAt(run, index, step, moment, die))


PLACES = led_by(
    (1, Step.ROLLOUT, "before"),
    # tests/chaos/test_every_moment.py strikes at them too
    (0, Step.ADMIT, "after"),
    (2, Step.ADMIT, "before"),
    (2, Step.ROLLOUT, "after"),
    (2, Step.FILTER, "before"),
    (1, Step.TRAIN, "before"),
    (2, Step.TRAIN, "after"),
)


@pytest.mark.parametrize(("index", "step", "moment"), PLACES, ids=lambda value: str(value))
def test_a_killed_run_loses_nothing_that_was_admitted_and_trains_on_nothing_twice(
    index: int, step: Step, moment: str, tiny_assets: Path, tmp_path: Path
) -> None:
    config = streaming(tiny_assets, 1 + index % 2, checkpoint={"save_interval": 2})
    driver = FORKS.Process(target=be_killed, args=(str(tmp_path), config, index, step, moment))
    driver.start()
    driver.join(200)
    assert driver.exitcode == -signal.SIGKILL
    ledger = Ledger.open(open_store(str(tmp_path)), "tiny")
    before = {commit.name: commit for number in ledger.iterations() for commit in ledger.commits(number)}
    logged = rows_that_ended(tmp_path)
    assert logged or (step, moment) != (Step.ROLLOUT, "before")
    with tiny_context(str(tmp_path), config) as (run, events):
        engine = run.fleet.rollout[0]
        generate, requested = engine.generate_samples, set[tuple[int, int]]()

        def asking(samples: Sequence[SampleRequest], *rest: Any) -> Any:
            requested.update(sample.key for sample in samples)
            return generate(samples, *rest)

        engine.generate_samples = asking  # type: ignore[method-assign]
        drive(run, DirectSteps(run))
        assert not requested & logged.keys(), "what had ended was generated again"
        assert not set(events.executed()) & set(before)
        takes = [run.committed(number, Step.ROLLOUT, "00-000") for number in range(ITERATIONS)]
        assert sorted(chain(*(take.values["groups"] for take in takes))) == list(range(2 * ITERATIONS))
        tokens = {
            (row["group_id"], row["sample_index"]): row["response_ids"]
            for take in takes
            for row in run.read(take).to_pylist()
        }
    assert {key: tokens[key] for key in logged} == logged
    assert not rows_that_ended(tmp_path), "the log keeps what commits have"
    with tiny_context(str(tmp_path), config) as (run, _):  # every update again, from what was committed
        restore_trainer(run, run.committed(ITERATIONS - 1, Step.TRAIN))


def rows_that_ended(folder: Path, how: Status | None = None) -> dict[tuple[int, int], list[int]]:
    """The responses in the logs of drivers, of samples that ended, or of those that did so in one way."""
    found = {}
    for path in sorted((folder / "runs/tiny/stream").rglob("*.arrow")):
        for row in pa.ipc.open_file(path).read_all().to_pylist():
            if row["status"] == how if how else row["status"] != Status.ABORTED:
                found[row["group_id"], row["sample_index"]] = row["response_ids"]
    return found


def test_what_the_filter_drops_is_replaced_by_prompts_that_are_admitted_for_it(
    tiny_assets: Path, tmp_path: Path
) -> None:
    (tmp_path / "odd.py").write_text(
        "calls = []\n\n"
        "def odd(rewards):\n"
        '    """Drops the second group that it is shown."""\n'
        "    calls.append(1)\n"
        "    return len(calls) != 2\n"
    )
    filtered = {"dynamic_sampling_filter": f"{tmp_path}/odd.py:odd"}
    config = streaming(tiny_assets, 1)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update=filtered)})
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        drive(run, DirectSteps(run))
        second = run.committed(0, Step.ADMIT, "01")
        assert len(second.values["groups"]) == 1
        assert run.committed(0, Step.ROLLOUT, "01-000").metrics["samples"] == 4
        commits = [commit for number in range(ITERATIONS) for commit in run.ledger.commits(number)]
        admitted = chain(*(commit.values["groups"] for commit in commits if commit.step is Step.ADMIT))
        taken = chain(*(commit.values["groups"] for commit in commits if commit.step is Step.ROLLOUT))
        assert sorted(admitted) == sorted(taken) == list(range(2 * ITERATIONS + 1))


class TryingAgain(DirectSteps):
    """Tries steps again, as often as they fail by what that can mend."""

    def __init__(self, run: RunContext) -> None:
        super().__init__(run)
        self.errors: list[str] = []

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        try:
            return super().call(step, index, shard, *args, **kwargs)
        except (EngineError, StoreError) as error:
            self.errors.append(f"{step.name} {error}")
            return self.call(step, index, shard, *args, **kwargs)


def test_an_engine_that_fails_is_asked_again_by_the_next_try(tiny_assets: Path, tmp_path: Path) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 1)) as (run, _):
        engine = run.fleet.rollout[0]
        generate, failures = engine.generate_samples, iter([True, False, True])

        def failing(*args: Any) -> Any:
            if next(failures, False):
                raise EngineError("it is gone")
            return generate(*args)

        engine.generate_samples = failing  # type: ignore[method-assign]
        steps = TryingAgain(run)
        drive(run, steps)
        assert next(failures, None) is None, "it was not asked again"
        assert set(steps.errors) <= {"rollout it is gone"}  # none where nobody was waiting
        assert taken_groups(run) == list(range(2 * ITERATIONS))


class Leaving(Membership):
    """Of engines that leave when they are lost, and do not come again."""

    def __init__(self, engines: Any) -> None:
        super().__init__(engines)
        self.left: list[RolloutHandle] = []

    @property
    def members(self) -> list[RolloutHandle]:
        return [engine for engine in self._engines if engine not in self.left]

    def leave(self, engine: RolloutHandle, why: str) -> bool:
        self.left.append(engine)
        self.changed()
        return True


def test_the_groups_of_an_engine_that_leaves_go_on_with_the_others_and_no_step_fails(
    tiny_assets: Path, tmp_path: Path
) -> None:
    config = streaming(tiny_assets, 1)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"num_engines": 2})})
    fleet = LocalFleet(config)
    leaving = fleet.membership = Leaving(fleet.rollout)
    generate, calls = fleet.rollout[1].generate_samples, iter([True])

    def dying(*args: Any) -> Any:
        if next(calls, False):
            return generate(*args)
        raise EngineDied("its machine is gone")

    fleet.rollout[1].generate_samples = dying  # type: ignore[method-assign]
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        drive(run, DirectSteps(run))
        assert [engine.name for engine in leaving.left] == ["rollout:1"]
        assert taken_groups(run) == list(range(2 * ITERATIONS))
        takes = [run.committed(index, Step.ROLLOUT, "00-000") for index in range(ITERATIONS)]
        assert {row["engine"] for row in run.read(takes[-1]).to_pylist()} == {"rollout:0"}
        assert (takes[0].metrics["engines"], takes[-1].metrics["engines"]) in {(2, 1), (1, 1)}


def test_a_log_that_could_not_be_written_is_begun_anew(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 1)) as (run, _):
        write, failures = run.ledger.store.write, iter([False, True, False, True])

        def failing(path: str, data: bytes) -> None:
            if "/stream/" in path and next(failures, False):
                raise StoreError("no answer")
            write(path, data)

        monkeypatch.setattr(run.ledger.store, "write", failing)
        steps = TryingAgain(run)
        drive(run, steps)
        assert next(failures, None) is None, "it was never written again"
        assert set(steps.errors) <= {"rollout no answer"}
        assert taken_groups(run) == list(range(2 * ITERATIONS))


class Held:
    """Holds the decoding of engines before a step until it may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
        self.proceed, self._held = threading.Event(), threading.Event()
        take_step, left = DecodeLoop._step, steps

        def holding(loop: DecodeLoop) -> None:
            nonlocal left
            if not self.proceed.is_set():
                left -= 1
                if left < 0:
                    self._held.set()
                    assert self.proceed.wait(60)
            take_step(loop)

        monkeypatch.setattr(DecodeLoop, "_step", holding)

    def wait(self) -> None:
        assert self._held.wait(60)


def test_samples_go_on_with_newer_weights_between_two_steps_and_none_ends(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 2)) as (run, _), open_stream(run):
        stream = run.attached(Stream)
        assert stream is not None
        direct = DirectSteps(run)
        publish_for_open_halves(run)
        admit_prompts(run, direct, 0)
        collect(run, direct, 0)
        blocked = Held(monkeypatch, 5)
        admit_prompts(run, direct, 1)
        blocked.wait()
        learn(run, direct, 0)
        stream.publish(weights_after(run, 0))
        wait_for(lambda: run.fleet.rollout[0].engine.get_weight_version() == 1, 60)
        wait_for(lambda: bool(rows_that_ended(tmp_path, Status.ABORTED)), 60)
        logged = rows_that_ended(tmp_path, Status.ABORTED)
        blocked.proceed.set()
        collect(run, direct, 1)
        take = run.committed(1, Step.ROLLOUT, "00-000")
        rows = run.read(take).to_pylist()
        assert any(len(row["weight_versions"]) > 5 for row in rows)
        for row in rows:
            assert row["weight_versions"] == [0] * min(5, len(row["response_ids"])) + [1] * (
                len(row["response_ids"]) - 5
            )
        went_on = [row for row in rows if len(row["response_ids"]) > 5]
        assert logged == {(row["group_id"], row["sample_index"]): row["response_ids"][:5] for row in went_on}
        assert take.metrics["interrupted_samples"] == len(went_on)
        assert take.metrics["recomputed_tokens"] == 5 * len(went_on)
        shown = iteration_metrics([take], run.config)
        assert shown["rollout/interrupted_samples"] == len(went_on)
        assert shown["rollout/recomputed_tokens"] == 5 * len(went_on)
        assert shown["perf/update_stall_time"] == take.timings["update_stall"] > 0
        assert "rollout/open_groups" in shown


def test_prompts_that_are_admitted_join_what_an_engine_is_at(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 2)) as (run, _), open_stream(run):
        stream = run.attached(Stream)
        assert stream is not None
        direct, blocked = DirectSteps(run), Held(monkeypatch, 3)
        publish_for_open_halves(run)
        admit_prompts(run, direct, 0)
        blocked.wait()
        admit_prompts(run, direct, 1)
        wait_for(lambda: sum(map(len, stream._state.running.values())) == 16, 60)
        blocked.proceed.set()
        for index in range(2):
            collect(run, direct, index)
            assert run.committed(index, Step.ROLLOUT, "00-000").metrics["interrupted_samples"] == 0
        assert taken_groups(run) == [0, 1, 2, 3]


def test_a_run_that_was_stopped_is_replayed_as_far_as_it_came(tiny_assets: Path, tmp_path: Path) -> None:
    config = streaming(tiny_assets, 2)
    with tiny_context(str(tmp_path / "store"), config) as (run, _):

        def interrupt() -> None:
            wait_for(lambda: run.find(1, Step.SYNC) is not None, 60)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            drive(run, EndingAt(run, 2, Step.ROLLOUT, "before", interrupt))
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        replayed = []
        for index in run.ledger.iterations():
            runner = Replaying(run, {Step.ADMIT, Step.ROLLOUT, Step.TRAIN}, None, open_store(str(tmp_path / "again")))
            with suppress(_EndOfLedger):
                _walk(run, runner, index)
            replayed += runner.replayed
        assert [one.name for one in replayed if one.name.endswith("train")] == ["000000/train", "000001/train"]
        assert [one.name for one in replayed if one.skipped] == ["000000/rollout.00-000", "000001/rollout.00-000"]
        assert not [one.name for one in replayed if one.differences]


def taken_groups(run: RunContext) -> list[int]:
    commits = [commit for number in range(ITERATIONS) for commit in run.ledger.commits(number)]
    return sorted(chain(*(commit.values["groups"] for commit in commits if commit.step is Step.ROLLOUT)))


def test_a_group_that_the_next_iteration_would_find_too_old_is_waited_for_and_taken_first(
    tiny_assets: Path, tmp_path: Path
) -> None:
    with tiny_context(str(tmp_path), streaming(tiny_assets, 1)) as (run, _):
        admission = admit(run, 0, "00", None, count=3)
        attempt = run.ledger.attempt(0, Step.ROLLOUT, "stream")
        stream = Stream(StepCall(run, 0, "stream", attempt, "inputs"), None, logs_of(run), ())
        fresh, also, old = admitted_groups(run, admission)
        stream.admit(admission, [sampled(fresh, 1, 4), sampled(also, 1, 4), sampled(old, 0, 3)])
        taken: list[Taken] = []
        waiting = threading.Thread(target=lambda: taken.append(stream.take(1, 2, lambda complete: None)), daemon=True)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive(), "iteration 2 could not train on tokens of version 0"
        stream.admit(admission, [sampled(old, 0, 4)])
        waiting.join(60)
        (found,) = taken
        assert [one.group.prompt.group_id for one in found.groups] == [old.prompt.group_id, fresh.prompt.group_id]
        assert found.open == {admission.name: [also.prompt.group_id]}
        # Nothing is too old for iteration 1 yet, so that iteration 0 waits for nobody.
        assert len(stream.take(0, 3, lambda complete: None).groups) == 3


def sampled(group: Group, version: int, finished: int) -> Group:
    """The group, with so many of its samples at their end, and another begun where there is one."""
    parts = {}
    for index in range(min(finished + 1, len(group.seeds))):
        reason = FinishReason.STOP if index < finished else FinishReason.ABORT
        tokens = np.asarray([5, 6], np.int32)
        segment = Segment(
            tokens, np.ones(2, np.uint8), FIRST_CALL, np.zeros(2, np.float32), tokens * 0 + version, 1, reason
        )
        parts[index] = GeneratedSample(group.prompt.group_id, index, Trajectory((segment,)), reason)
    return replace(group, parts=parts)


def logs_of(run: RunContext) -> Callable[[Collection[int]], tuple[SampleLog, None]]:
    folder = AttemptFolder(run.ledger.store, layout.stream("tiny"), "000001-ab", root=layout.run("tiny"))
    return lambda groups: (SampleLog(folder, "inputs", encode=partial(encode_rows, run), groups=groups), None)
