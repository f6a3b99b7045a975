"""`replay --all`: a whole run again, held against its ledger, with engines that start once."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.types import TrainBatch
from cairn.flows.cli import app
from cairn.flows.events import Event
from cairn.flows.history import replay as module
from cairn.flows.history.fork import fork
from cairn.flows.history.replay import replay_all
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.storage.upkeep.redaction import redact
from cairn.tasks.batch.source import train_batch
from cairn.tasks.durable.context import RunContext
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

Opened = list[str]


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    rollout = {"num_rollout": 2, "rollout_batch_size": 2, "rollout_max_response_len": 8}
    return tiny_config(tiny_assets, rollout=rollout, checkpoint={"save_interval": 1})


@pytest.fixture(scope="module")
def made(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with the run `tiny`, and its fork `child` at iteration 0."""
    url = str(tmp_path_factory.mktemp("store"))
    with tiny_context(url, config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        child = fork(run.ledger, 0, "child", ["training.lr=0.01"])
    heir = RunConfig.model_validate(child.manifest.config)
    with tiny_context(url, heir, "child") as (run, _):
        iteration(run, DirectSteps(run), 1)
    return url


@pytest.fixture
def opened(made: str, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Runs whose engines were started for a replay, and whether it was the training engine alone; they work in this
    process."""
    names: Opened = []

    @contextmanager
    def context(
        ledger: Ledger, emit: Callable[[Event], None], *, trains_only: bool, made: Commit | None
    ) -> Iterator[RunContext]:
        names.append(f"{ledger.run}, trainer" if trains_only else ledger.run)
        config = RunConfig.model_validate(ledger.manifest.config)
        with tiny_context(ledger.store.url, config, ledger.run) as (run, _):
            yield run

    monkeypatch.setattr(module, "read_only_context", context)
    return names


def cairn(store: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--store", store])


def commits_of(ledger: Ledger) -> list[str]:
    return sorted(commit.name for index in ledger.iterations() for commit in ledger.commits(index))


@pytest.mark.parametrize(("name", "engines"), [("tiny", ["tiny"]), ("child", ["tiny", "child"])])
def test_every_commit_is_done_again_once_and_engines_start_once(
    made: str, opened: Opened, name: str, engines: list[str]
) -> None:
    ledger = Ledger.open(open_store(made), name)
    before = open_store(made).find("runs")
    replayed: list[str] = []
    found = replay_all(ledger, on_replayed=lambda one: replayed.append(one.name))
    assert sorted(replayed_step.name for replayed_step in found) == commits_of(ledger)
    assert [replayed_step.differences for replayed_step in found] == [()] * len(found)
    assert replayed == [replayed_step.name for replayed_step in found]
    assert opened == engines
    assert {path for path in open_store(made).find("runs") if "/leases/" not in path} == {
        path for path in before if "/leases/" not in path
    }


def test_the_command_counts_what_is_equal_and_ends_with_1_where_anything_differs(
    made: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = cairn(made, "replay", "tiny", "--all", "--step", "reward")
    assert (result.exit_code, result.stdout) == (
        0,
        "000000/reward.00-000: equal, bit for bit\n000001/reward.00-000: equal, bit for bit\n"
        "run tiny: 2 steps are equal, bit for bit; 0 differ, 0 cannot be repeated\n",
    )
    monkeypatch.setattr("cairn.tasks.generation.groups.sample_seed", lambda *place: 1)
    result = cairn(made, "replay", "tiny", "--all", "--step", "rollout", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["equal"], answer["differ"], answer["skipped"]) == (1, 0, 2, 0)
    assert "response_ids" in answer["steps"][0]["differences"][0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["tiny@1"],
        ["--all", "tiny@1"],
        ["tiny@1", "train", "--step", "train"],
        ["tiny", "--all", "--step", "training"],
        ["--weights", "tiny@1", "train"],
        ["tiny", "--weights", "--all"],
        ["tiny", "--weights", "--step", "train"],
        ["tiny"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(made: str, opened: Opened, arguments: list[str]) -> None:
    assert cairn(made, "replay", *arguments).exit_code == 2
    assert opened == []


def test_the_weights_come_out_the_same_from_the_committed_batches_with_a_trainer_alone(
    made: str, opened: Opened
) -> None:
    trained = Ledger.open(open_store(made), "child").find(1, Step.TRAIN)
    assert trained is not None
    result = cairn(made, "replay", "child", "--weights")
    assert (result.exit_code, result.stdout.splitlines()) == (
        0,
        [
            *(f"00000{i}/{step}: equal, bit for bit" for i in (0, 1) for step in ("advantage", "train")),
            f"run child: the weights after iteration 1 are the same: version 2, state {trained.state_digest}",
        ],
    )
    assert opened == ["tiny, trainer", "child, trainer"]


def test_the_first_update_that_gives_other_weights_is_named(
    made: str, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(*recorded: Any) -> TrainBatch:
        batch = train_batch(*recorded)
        assert batch.advantages is not None
        return dataclasses.replace(batch, advantages=[2 * advantages for advantages in batch.advantages])

    monkeypatch.setattr("cairn.tasks.trainer.train.snapshot_batch", other)
    result = cairn(made, "replay", "tiny", "--weights")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        1,
        "run tiny: the weights after iteration 1 differ: 000000/train is the first step with another result",
    )
    answer = json.loads(cairn(made, "replay", "tiny", "--weights", "--json").stdout)
    assert (answer["weights"]["same"], answer["weights"]["differs_at"]) == (False, "000000/train")


def test_weights_of_a_run_that_has_none_of_its_own_are_not_repeated(
    made: str, opened: Opened, config: RunConfig
) -> None:
    Ledger.create(open_store(made), "begun", config)
    result = cairn(made, "replay", "begun", "--weights")
    assert (result.exit_code, opened) == (2, [])
    assert "run 'begun' has trained on nothing yet" in result.output


def test_what_was_redacted_is_no_difference_and_not_done_again(made: str, opened: Opened) -> None:
    ledger = Ledger.open(open_store(made), "tiny")
    commit = ledger.find(1, Step.ROLLOUT, "00-000")
    assert commit is not None
    with tiny_context(made, RunConfig.model_validate(ledger.manifest.config), "tiny") as (run, _):
        prompt = run.read(commit, ["prompt_index"]).column(0)[0].as_py()
    redact(ledger, prompt)
    found = {replayed_step.name: replayed_step for replayed_step in replay_all(ledger)}
    assert [replayed_step.differences for replayed_step in found.values()] == [()] * len(found)
    done = {name for name, replayed_step in found.items() if replayed_step.skipped is None}
    assert {name for name in found if name.startswith("000000/")} | {"000001/checkpoint", "000001/sync"} <= done
    for name in ("000001/rollout.00-000", "000001/train"):
        assert (found[name].skipped or "").startswith("decision 1 has redacted samples of 000001/")
    result = cairn(made, "replay", "tiny", "--weights")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (
        0,
        "run tiny: the weights after iteration 1 cannot be computed again; 1 update cannot be repeated",
    )
