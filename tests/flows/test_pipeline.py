"""Halves side by side: what each of them reads, who stops whom, and where the next driver goes on."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fleet import LEAST_OBJECT_STORE, _object_store_memory
from cairn.engines.types.errors import EngineError, PublicationGone, WeightsDiffer
from cairn.flows.events import Stopping
from cairn.flows.history.diff import diff
from cairn.flows.history.replay import replay, replay_all
from cairn.flows.iteration import iteration
from cairn.flows.pipeline import Pipeline
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import DurableStep
from cairn.tasks.selecting.sample_filters import NothingLeft
from cairn.tasks.trainer.sync import serve
from tests.chaos.in_process import EndingAt, Killed, drive
from tests.tiers import led_by
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

ITERATIONS = 5


def lagged(assets: Path, lag: int, **sections: dict[str, Any]) -> RunConfig:
    rollout = {
        "num_rollout": ITERATIONS,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8,
        "pipeline": "lagged",
        "lag": lag,
    }
    return tiny_config(assets, rollout=rollout, **sections)


def digests(run: RunContext) -> list[str | None]:
    return [run.committed(index, Step.TRAIN).state_digest for index in range(ITERATIONS)]


@pytest.fixture(scope="module")
def undisturbed(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str | None]]:
    """State digests of runs whose halves were executed one after the other, by their lag."""
    found = {}
    for lag in (1, 2):
        store = tmp_path_factory.mktemp(f"lag{lag}")
        with tiny_context(str(store), lagged(tiny_assets, lag)) as (run, _):
            for index in range(ITERATIONS):
                iteration(run, DirectSteps(run), index)
            found[lag] = digests(run)
    return found


@pytest.mark.parametrize("lag", [1, 2])
def test_side_by_side_gives_what_one_after_the_other_gives(
    lag: int, tiny_assets: Path, tmp_path: Path, undisturbed: dict[int, list[str | None]]
) -> None:
    with tiny_context(str(tmp_path), lagged(tiny_assets, lag)) as (run, _):
        assert drive(run, DirectSteps(run)) == list(range(ITERATIONS))
        assert digests(run) == undisturbed[lag]
        for index in range(ITERATIONS):
            assert run.committed(index, Step.ROLLOUT, "00-000").weight_version_in == max(0, index - lag)
            assert run.committed(index, Step.ADVANTAGE).metrics["age/max"] == min(index, lag)
            assert run.committed(index, Step.TRAIN).weight_version_in == index
        assert run.fleet.weights.published() == set(range(ITERATIONS + 1)[-lag - 2 :])


def test_a_half_learns_while_the_next_one_is_collected(tiny_assets: Path, tmp_path: Path) -> None:
    collecting, learned = threading.Event(), threading.Event()

    class Meeting(DirectSteps):
        """The train step of iteration 0 waits until iteration 1 is rolled out, which waits for nobody."""

        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if (index, step.name) == (0, Step.TRAIN):
                assert collecting.wait(60), "iteration 1 is not collected beside"
            commit = super().call(step, index, shard, *args, **kwargs)
            if (index, step.name) == (1, Step.ROLLOUT):
                assert not learned.is_set()
                collecting.set()
            if (index, step.name) == (0, Step.TRAIN):
                learned.set()
            return commit

    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _):
        drive(run, Meeting(run))


def test_without_a_lag_the_next_iteration_is_made_while_one_learns_and_begins_when_that_is_done(
    tiny_assets: Path, tmp_path: Path
) -> None:
    made = threading.Event()
    done: list[tuple[int, Step]] = []

    class Meeting(DirectSteps):
        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if (index, step.name) == (0, Step.TRAIN):
                assert made.wait(60), "iteration 1 is not made beside"
            commit = super().call(step, index, shard, *args, **kwargs)
            done.append((index, step.name))
            return commit

    config = lagged(tiny_assets, 1)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"pipeline": "sync", "lag": None})})
    with tiny_context(str(tmp_path), config) as (run, _):
        pipeline = Pipeline(run, Meeting(run), 0, learned=lambda index: None, stop=run.stopping.set)

        def iterate(index: int) -> list[Commit]:
            if index == 1:
                made.set()
            return pipeline.iterate(index)

        with closing(pipeline.run(iterate, 3)) as iterations:
            assert [index for index, _ in iterations] == [0, 1, 2]
        assert not run.side_by_side
    assert done == sorted(done, key=lambda one: one[0])


def test_advantages_are_estimated_while_the_iteration_before_learns(tiny_assets: Path, tmp_path: Path) -> None:
    estimated = threading.Event()
    done: list[tuple[int, Step]] = []

    class Meeting(DirectSteps):
        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if (index, step.name) == (1, Step.TRAIN):
                assert estimated.wait(60), "the trainer is waited for"
            commit = super().call(step, index, shard, *args, **kwargs)
            done.append((index, step.name))
            if (index, step.name) == (2, Step.ADVANTAGE):
                estimated.set()
            return commit

    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _):
        drive(run, Meeting(run))
    assert [index for index, step in done if step is Step.ADVANTAGE] == list(range(ITERATIONS)), "each once"


def test_what_is_ahead_of_an_update_that_is_not_made_is_replayed_and_compared(
    tiny_assets: Path, tmp_path: Path
) -> None:
    estimated = threading.Event()

    class Ending(DirectSteps):
        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if (index, step.name) == (1, Step.TRAIN):
                assert estimated.wait(60)
                raise Killed
            commit = super().call(step, index, shard, *args, **kwargs)
            if (index, step.name) == (2, Step.ADVANTAGE):
                estimated.set()
            return commit

    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _), pytest.raises(Killed):
        drive(run, Ending(run))
    ledger = Ledger.open(run.ledger.store, run.ledger.run)
    (replayed,) = replay(ledger, 2, Step.ADVANTAGE)
    assert (replayed.name, replayed.differences) == ("000002/advantage", ())
    assert [one.name for one in replay_all(ledger, {Step.ADVANTAGE})] == [f"{n:06d}/advantage" for n in range(3)]

    with tiny_context(str(tmp_path / "whole"), lagged(tiny_assets, 1)) as (run, _):
        drive(run, DirectSteps(run))
    found = diff(ledger, Ledger.open(run.ledger.store, run.ledger.run))
    assert (found.parts_at, found.ended) == (None, ledger.run)


def test_a_half_that_fails_stops_the_other(tiny_assets: Path, tmp_path: Path) -> None:
    class Failing(DirectSteps):
        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if self._run.stopping.is_set():
                raise Stopping
            if (index, step.name) == (2, Step.TRAIN):
                raise EngineError("the very one")
            return super().call(step, index, shard, *args, **kwargs)

    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _):
        with pytest.raises(EngineError, match="the very one"):
            drive(run, Failing(run))
        assert run.find(2, Step.TRAIN) is None
        assert run.find(4, Step.ROLLOUT, "00-000") is None


def test_what_came_before_is_learned_though_advantages_cannot_be_estimated(tiny_assets: Path, tmp_path: Path) -> None:
    """Or no driver would get as far as to where the run can be forked."""
    failing = threading.Event()

    class Failing(DirectSteps):
        def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
            if self._run.stopping.is_set():
                raise Stopping
            if (index, step.name) == (1, Step.TRAIN):
                assert failing.wait(60)
            if (index, step.name) == (2, Step.ADVANTAGE):
                failing.set()
                raise NothingLeft("no token to train on")
            return super().call(step, index, shard, *args, **kwargs)

    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _):
        with pytest.raises(NothingLeft, match="no token"):
            drive(run, Failing(run))
        assert run.find(1, Step.SYNC) is not None
        assert run.find(2, Step.TRAIN) is None
        assert run.find(4, Step.ROLLOUT, "00-000") is None


PLACES = led_by(
    (1, Step.ADVANTAGE, "after"),
    (2, Step.TRAIN, "before"),
    # tests/chaos/test_every_moment.py strikes at them too
    (1, Step.ROLLOUT, "after"),
    (2, Step.FILTER, "before"),
    (2, Step.FILTER, "after"),
    (2, Step.TRAIN, "after"),
    (3, Step.SYNC, "before"),
)


@pytest.mark.parametrize(("index", "step", "moment"), PLACES, ids=lambda value: str(value))
def test_a_killed_run_goes_on_at_its_oldest_open_half_and_keeps_its_live_trainer(
    index: int,
    step: Step,
    moment: str,
    tiny_assets: Path,
    tmp_path: Path,
    undisturbed: dict[int, list[str | None]],
) -> None:
    lag = 1 + index % 2
    config = lagged(tiny_assets, lag, checkpoint={"save_interval": 2})
    with tiny_context(str(tmp_path), config) as (run, _), pytest.raises(Killed):
        drive(run, EndingAt(run, index, step, moment))
    with tiny_context(str(tmp_path), config) as (run, events):
        drive(run, DirectSteps(run))
        assert digests(run) == undisturbed[lag]
        assert run.fleet.training.restarts == 0, "the live trainer went back to serve an older version"
    assert not [name for name in events.executed() if int(name[:6]) < index - lag]


def test_a_publication_that_is_of_no_use_while_another_half_learns_is_named(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_context(str(tmp_path), lagged(tiny_assets, 1)) as (run, _):
        iteration(run, DirectSteps(run), 0)
        run.side_by_side = True
        run.fleet._published.clear()
        trained = run.committed(0, Step.TRAIN)
        with pytest.raises(PublicationGone, match=r"weight version 1 is not published any more.*cairn resume"):
            serve(run, run.fleet.rollout[0], trained)
        monkeypatch.setattr(run.fleet, "serve", Mock(side_effect=WeightsDiffer("it holds other weights")))
        with pytest.raises(PublicationGone, match=r"version 1 was dropped \(it holds other weights\).*cairn resume"):
            serve(run, run.fleet.rollout[0], trained)


def test_no_room_is_made_for_weights_that_servers_map_from_the_gpus_of_training(tiny_assets: Path) -> None:
    config = lagged(tiny_assets, 1)
    fleet = config.fleet.model_copy(update={"colocate": True})
    rollout = config.rollout.model_copy(update={"engine": "sglang", "num_gpus_per_engine": 1})
    mapped = config.model_copy(update={"fleet": fleet, "rollout": rollout})
    assert _object_store_memory(mapped) == LEAST_OBJECT_STORE < _object_store_memory(config)
    on_cpus = rollout.model_copy(update={"num_gpus_per_engine": 0})
    assert _object_store_memory(mapped.model_copy(update={"rollout": on_cpus})) == _object_store_memory(config)


def test_room_is_made_for_no_more_publications_than_a_run_makes(tiny_assets: Path) -> None:
    rooms = [_object_store_memory(lagged(tiny_assets, lag)) for lag in (ITERATIONS, 10**6)]
    assert rooms[0] == rooms[1]
