"""A run that goes on in another layout: what the ledger records, and what is refused."""

import json
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.cli import app
from cairn.flows.driver import session
from cairn.flows.driver.session import open_run
from cairn.flows.driver.trust import recorded_config
from cairn.flows.history import replay
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.flows.reading.costs import driver_seconds, run_costs
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import all_leases
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.store.errors import RunDiffers
from cairn.storage.upkeep.verification import counts, verify
from cairn.tasks.trainer.recovery import ReplayDiverged, restore_trainer
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, Events, killed_driver, tiny_config, tiny_context

FIRST = 4096
NEW = ("rollout.num_engines=1", "training.max_tokens_per_gpu=96")


BATCH = {"num_rollout": 5, "num_engines": 2, "rollout_batch_size": 2, "rollout_max_response_len": 8}


@pytest.fixture(scope="module", autouse=True)
def started() -> Iterator[list[int]]:
    """Engines in this process. Returns the `training.max_tokens_per_gpu` of each training engine that starts."""
    started: list[int] = []

    @contextmanager
    def local_fleet(config: RunConfig, *_: Any, **options: Any) -> Iterator[Any]:
        @cache
        def start() -> LocalFleet:
            started.append(config.training.max_tokens_per_gpu or 0)
            return LocalFleet(config)

        yield start

    with pytest.MonkeyPatch.context() as patched:
        for module in (session, replay):
            patched.setattr(module, "starting_fleet", local_fleet)
        yield started


def tiny(assets: Path, interval: int | None = 1, **rollout: Any) -> RunConfig:
    rollout = {"num_rollout": 3, "num_engines": 2} | rollout
    training = {"max_tokens_per_gpu": FIRST}
    return tiny_config(assets, rollout=rollout, training=training, checkpoint={"save_interval": interval})


def go_on(store: str, *relayout: str, first: int, end: int | None = None, run: str = "tiny") -> Events:
    events = Events()
    with open_run(open_store(store), run, None, takeover=True, relayout=relayout, emit=events.append) as context:  # type: ignore[arg-type]
        for index in range(first, end or context.config.rollout.num_rollout):
            iteration(context, DirectSteps(context), index)
    return events


@pytest.fixture(scope="module")
def changed(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the run `tiny`: iterations 0 and 1 in one layout, 2 and 3 in another, 4 in the first one again.
    Checkpoints are after 1, 3 and 4."""
    store, config = str(tmp_path_factory.mktemp("changed")), tiny(tiny_assets, 2, **BATCH)
    with tiny_context(store, config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
    events = go_on(store, *NEW, first=1, end=4)
    assert any("rollout.num_engines was 2, is 1" in str(event) for event in events)
    go_on(store, "rollout.num_engines=2", f"training.max_tokens_per_gpu={FIRST}", first=3)
    return store


def test_the_ledger_records_each_layout_and_earlier_commits_stay_valid(changed: str) -> None:
    ledger = Ledger.open(open_store(changed), "tiny")
    assert [{commit.terms for commit in ledger.commits(index)} for index in range(5)] == [{0}, {0}, {1}, {1}, {2}]
    assert [ledger.config_of(*ledger.commits(index)).rollout.num_engines for index in range(5)] == [2, 2, 1, 1, 2]
    checks = list(verify(ledger))
    assert not [finding for one in checks for finding in one.findings]
    assert (counts(checks)["upgrades"], counts(checks)["layouts"]) == (0, 2)
    assert checks[1].layout == {"training.max_tokens_per_gpu": (FIRST, 96), "rollout.num_engines": (2, 1)}
    go_on(changed, first=4)  # nothing is left to do, and the newest layout is that of the run
    ledger = Ledger.open(open_store(changed), "tiny")
    assert (len(ledger.upgrades), recorded_config(ledger).training.max_tokens_per_gpu) == (2, FIRST)
    with pytest.raises(RunDiffers, match=r"rollout\.num_engines is 2 in the ledger, 1 now"):
        Ledger.open(open_store(changed), "tiny", ledger.config_of(*ledger.commits(2)))


def test_commands_call_a_change_of_the_layout_by_its_name(changed: str) -> None:
    def shown(*words: str) -> str:
        result = CliRunner().invoke(app, [*words, "tiny", "--store", changed], env={"COLUMNS": "300"})
        assert result.exit_code == 0, result.output
        return result.stdout

    text = shown("verify")
    assert "layout: training.max_tokens_per_gpu 4096 → 96, rollout.num_engines 2 → 1 (upgrades/000001.json)" in text
    assert "2 changes of the layout" in text
    assert "another version" not in text
    assert "rollout.num_engines 1 → 2" in shown("status")
    assert len(json.loads(shown("status", "--json"))["layouts"]) == 2
    assert json.loads(shown("costs", "--json"))["devices"]["rollout"] == 2


def test_status_and_costs_count_each_layout_for_its_own_iterations(changed: str) -> None:
    ledger = Ledger.open(open_store(changed), "tiny")
    status = run_status(ledger.store, "tiny")
    assert len(status.written_by) == 1
    assert list(map(str, status.layouts)) == [
        f"training.max_tokens_per_gpu {FIRST} → 96, rollout.num_engines 2 → 1",
        f"training.max_tokens_per_gpu 96 → {FIRST}, rollout.num_engines 1 → 2",
    ]
    commits = [commit for index in range(5) for commit in ledger.commits(index)]
    own = {
        lease.epoch: [one for one in commits if one.epoch == lease.epoch] for lease in all_leases(ledger.store, "tiny")
    }
    seconds = [driver_seconds(lease, own[lease.epoch])[0] for lease in all_leases(ledger.store, "tiny")]
    costs = run_costs(ledger)
    threads = [3, 2, 3, 3][: len(seconds)]  # engines, and the trainer
    assert costs.reserved_device_seconds == pytest.approx(sum(map(operator.mul, threads, seconds)))
    assert costs.devices.rollout == 2


def test_each_update_is_replayed_in_the_layout_in_which_it_was_made(changed: str, started: list[int]) -> None:
    ledger = Ledger.open(open_store(changed), "tiny")
    started.clear()
    said: list[str] = []
    (update,) = replay.replay(ledger, 2, Step.TRAIN, emit=lambda event: said.append(str(event)))
    assert (update.differences, started) == ((), [96])
    assert any("000002/train is replayed in the layout in which it was made" in one for one in said)
    with replay.read_only_context(ledger, said.append, made=ledger.find(2, Step.TRAIN)) as run:  # type: ignore[arg-type]
        other = r"000000/train was made in another layout \(training\.max_tokens_per_gpu 4096 then, 96 now\)"
        with pytest.raises(ReplayDiverged, match=other):
            restore_trainer(run, run.committed(0, Step.TRAIN))
    started.clear()
    found = replay.replay_all(ledger, {Step.ROLLOUT, Step.TRAIN})
    assert [one.differences for one in found] == [()] * len(found)
    assert started == [FIRST, 96, FIRST]


def test_a_fork_restores_its_weights_in_the_layout_of_their_iteration(changed: str, started: list[int]) -> None:
    ledger = Ledger.open(open_store(changed), "tiny")
    child = fork(ledger, 2, "child")
    started.clear()
    go_on(changed, first=3, run="child", end=4)
    assert started == [96, FIRST]
    trained, saved = ledger.find(2, Step.TRAIN), child.find(2, Step.CHECKPOINT)
    assert trained is not None
    assert saved is not None
    assert saved.state_digest == trained.state_digest


def test_a_driver_that_dies_after_the_record_of_a_layout_leaves_it_in_force(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets, **BATCH)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    with open_run(open_store(store), "tiny", None, takeover=True, relayout=NEW) as run:
        assert run.ledger.lease is not None
        run.ledger._terms.record(run.ledger.lease)
    go_on(store, first=0, end=2)
    go_on(store, "rollout.num_engines=3", first=1, end=3)
    ledger = Ledger.open(open_store(store), "tiny")
    layouts = [ledger.config_of(*ledger.commits(index)) for index in range(3)]
    assert [(one.rollout.num_engines, one.training.max_tokens_per_gpu) for one in layouts] == [
        (2, FIRST),
        (1, 96),
        (3, 96),
    ]


def test_shards_of_a_round_that_was_cut_for_more_engines_are_kept(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets)
    killed_driver(store, config, Step.REWARD)
    kept = [commit for commit in Ledger.open(open_store(store), "tiny").commits(1) if commit.step is Step.ROLLOUT]
    assert kept
    events = go_on(store, "rollout.num_engines=1", first=1)
    assert {commit.name for commit in kept} <= set(events.adopted())


def test_weights_that_are_in_no_checkpoint_are_not_replayed_in_another_layout(
    tiny_assets: Path, tmp_path: Path
) -> None:
    store, config = str(tmp_path), tiny(tiny_assets, interval=None)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    with pytest.raises(ConfigError, match=r"weights of iteration 0 from a checkpoint .* but it has none"):
        go_on(store, *NEW, first=0)
    go_on(store, "rollout.num_engines=1", first=0)  # its weights do not depend on that


def test_other_options_are_refused(tiny_assets: Path, tmp_path: Path) -> None:
    store, config = str(tmp_path), tiny(tiny_assets)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    with pytest.raises(ConfigError, match=r"--set training\.lr: only the layout .* `cairn fork tiny@N"):
        go_on(store, "training.lr=0.5", first=0)
    assert not Ledger.open(open_store(store), "tiny").upgrades
