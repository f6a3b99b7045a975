"""A ledger that an earlier version of the code wrote is read, goes on, and is forked: see tests/fixtures/ledgers."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import create_model
from typer.testing import CliRunner

from cairn.configs.schema.data import DataConfig
from cairn.configs.schema.run import RunConfig
from cairn.flows.cli import app
from cairn.flows.driver.trust import recorded_config
from cairn.flows.history.diff import diff
from cairn.flows.history.fork import fork
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import FORMAT, Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ROLLOUT, SCHEMAS
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.storage.records import CodeVersion
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, RunDiffers, StaleCommits
from cairn.storage.upkeep.verification import verify
from cairn.tasks.steps import STEPS
from tests.fixtures.ledgers.make import CONFIG
from tests.tiny_run import DirectSteps, Events, tiny_config, tiny_context

pytestmark = pytest.mark.proof

FIXTURE = Path(__file__).parents[1] / "fixtures" / "ledgers" / str(FORMAT)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store with the runs of an earlier version, and its files where the configurations say."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return str(tmp_path)


def recorded(store: str, run: str) -> RunConfig:
    return recorded_config(Ledger.open(open_store(store), run))


def go_on(store: str, run: str, config: RunConfig | None = None) -> Events:
    """To the end of the run, from where it stands."""
    config = config or recorded(store, run)
    with tiny_context(store, config, run) as (context, events):
        for index in range(context.ledger.last_iteration() or 0, config.rollout.num_rollout):
            iteration(context, DirectSteps(context), index)
    return events


def committed(store: str, run: str) -> list[Commit]:
    ledger = Ledger.open(open_store(store), run)
    return [commit for index in ledger.iterations() for commit in ledger.commits(index)]


def faults(store: str, run: str) -> list[str]:
    return [fault.message for one in verify(Ledger.open(open_store(store), run)) for fault in one.findings]


def cairn(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, result.output
    return result.stdout  # what else this process logs goes to stderr


@pytest.mark.parametrize("run", ["parent", "branch"])
def test_every_reading_command_reads_it(earlier: str, run: str) -> None:
    status = json.loads(cairn("status", run, "--json", "--store", earlier))
    assert (status["state"], status["iteration"]) == ("interrupted", 2)
    assert status["step"] == ("rollout" if run == "parent" else "train")
    assert len(json.loads(cairn("show", f"{run}@1", "--json", "--store", earlier))) == 4
    assert not json.loads(cairn("verify", run, "--json", "--store", earlier))["findings"]
    assert run in cairn("runs", "--store", earlier)
    assert "first differ at 000002" in cairn("diff", "parent", "branch", "--store", earlier, code=1)
    assert cairn("gc", run, "--store", earlier)


def test_the_recipe_that_started_a_run_still_continues_it(earlier: str) -> None:
    Ledger.open(open_store(earlier), "parent", tiny_config(Path("."), **CONFIG))  # raises where a default has changed


@pytest.mark.parametrize("step", ["reward", "reward.00-000"])
def test_a_step_is_replayed_beside_one_that_was_not_done(earlier: str, step: str) -> None:
    """The rollout of the iteration's other shard was killed."""
    (again,) = json.loads(cairn("replay", "parent@2", step, "--json", "--store", earlier))
    assert (again["name"], again["differences"]) == ("000002/reward.00-000", [])


def test_its_commits_keep_their_digests(earlier: str) -> None:
    for commit in [*committed(earlier, "parent"), *committed(earlier, "branch")]:
        path = layout.commit(commit.run, commit.iteration, commit.step, commit.shard)
        assert commit.to_bytes() == open_store(earlier).read(path)
        assert f'"digest": "{commit.digest}"'.encode() in commit.to_bytes()


def test_a_run_goes_on_to_its_end_and_nothing_committed_is_done_again(earlier: str) -> None:
    before = {commit.name: commit for commit in committed(earlier, "parent")}
    events = go_on(earlier, "parent")
    after = {commit.name: commit for commit in committed(earlier, "parent")}
    assert {name: after[name] for name in before} == before
    assert set(events.executed()) == after.keys() - before.keys()
    shard = after["000002/rollout.00-001"]
    assert (shard.metrics["recovered_groups"], shard.metrics["generated_groups"]) == (2, 0)  # the write-ahead log
    assert {commit.terms for commit in before.values()} == {0}
    assert {after[name].terms for name in events.executed()} == {1}
    assert all("engine.training" in after[f"00000{index}/train"].inputs for index in range(3))
    assert not after["000002/sync"].outputs  # it stores no weights where it did not before
    assert not faults(earlier, "parent")
    assert json.loads(cairn("status", "parent", "--json", "--store", earlier))["state"] == "completed"


def test_a_fork_goes_on_from_what_it_shares(earlier: str) -> None:
    events = go_on(earlier, "branch")
    assert events.executed()[:2] == ["000002/train", "000002/checkpoint"]
    assert not faults(earlier, "branch")


def test_it_is_forked(earlier: str) -> None:
    ledger = Ledger.open(open_store(earlier), "parent")
    fork(ledger, 1, "younger", ["training.lr=1e-5"])
    options = diff(ledger, Ledger.open(ledger.store, "younger")).options
    assert [name for name, _, _ in options] == ["training.lr"]
    events = go_on(earlier, "younger")
    assert "000002/rollout.00-000" in events.executed()
    assert {commit.terms for commit in committed(earlier, "younger") if commit.run == "younger"} == {0}
    assert not faults(earlier, "younger")


def test_the_first_commit_of_another_version_records_it_and_reading_does_not(
    earlier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(earlier, "runs/parent/upgrades")
    cairn("status", "parent", "--store", earlier)
    with tiny_context(earlier, recorded(earlier, "parent"), "parent"):
        pass
    assert not folder.exists()
    go_on(earlier, "parent")
    assert [file.name for file in folder.iterdir()] == ["000001.json"]
    versions = json.loads(cairn("status", "parent", "--json", "--store", earlier))["written_by"]
    assert versions[0]["commit"] == Ledger.open(open_store(earlier), "parent").manifest.code_version.commit
    assert versions[1]["commit"] != versions[0]["commit"]
    assert "1 upgrade to another version" in cairn("verify", "parent", "--store", earlier)
    go_on(earlier, "parent")
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr("cairn.storage.ledger.terms.code_version", lambda: CodeVersion(package="9", commit=None))
    go_on(earlier, "parent")
    assert len(list(folder.iterdir())) == 1  # it had nothing left to commit


def newer_schema() -> type[RunConfig]:
    """With an option more, at the top of a section that steps read as a whole."""
    data: Any = create_model("NewerData", __base__=DataConfig, max_age=(int, 3))
    newer: Any = create_model("NewerRun", __base__=RunConfig, data=(data, ...))
    return newer


def newer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step reads an option more, and an input."""
    for name, step in STEPS.items():
        more = replace(step, reads=(*step.reads, "fleet.colocate"), externals=(*step.externals, "engine"))
        for module in ("cairn.flows.iteration", step.body.__module__, "cairn.tasks.steps"):
            for attribute, value in vars(__import__(module, fromlist=["_"])).items():
                if value is step:
                    monkeypatch.setattr(f"{module}.{attribute}", more)
        monkeypatch.setitem(STEPS, name, more)


def newer_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import tiny_run

    digests: Callable[..., dict[str, str]] = tiny_run.input_digests
    monkeypatch.setattr(tiny_run, "input_digests", lambda *given: {**digests(*given), "engine": "e" * 64})


def test_an_added_option_a_longer_reads_and_an_added_input_make_no_commit_stale(
    earlier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer_steps(monkeypatch)
    newer_inputs(monkeypatch)
    schema = newer_schema()
    config = schema.model_validate(recorded(earlier, "parent").model_dump(mode="json"))
    done = {commit.name for commit in committed(earlier, "parent")}
    events = go_on(earlier, "parent", config)
    assert "000002/rollout.00-000" in events.adopted()
    assert done.isdisjoint(events.executed())
    made = next(commit for commit in committed(earlier, "parent") if commit.name == "000002/train")
    assert made.inputs["engine"] == "e" * 64
    again = go_on(earlier, "parent", config)
    assert not again.executed()
    upgrade = Ledger.open(open_store(earlier), "parent").terms
    assert upgrade.config["data"]["max_age"] == 3  # type: ignore[index, call-overload]
    assert "fleet.colocate" in upgrade.rules["train"].reads  # type: ignore[index]
    other = config.model_copy(update={"data": config.data.model_copy(update={"max_age": 4})})
    with pytest.raises(RunDiffers, match="max_age is 3 in the ledger, 4 now"), tiny_context(earlier, other, "parent"):
        pass
    digests = {"engine": "f" * 64}
    with pytest.raises(RunDiffers, match="digest of engine"):
        Ledger.open(open_store(earlier), "parent", config, {**upgrade.inputs, **digests})


def test_columns_that_its_tables_lack_are_null(earlier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wider = ROLLOUT.insert(3, pa.field("admitted_at", pa.int64()))
    monkeypatch.setitem(SCHEMAS, Step.ROLLOUT, wider)
    for module in ("cairn.storage.ledger.schemas", "cairn.tasks.generation.groups"):
        monkeypatch.setattr(f"{module}.ROLLOUT", wider)
    go_on(earlier, "parent")
    for commit in committed(earlier, "parent"):
        if commit.step is Step.ROLLOUT:
            table = read_table(open_store(earlier), commit.run, commit.outputs[0])
            assert table.schema.equals(wider)
            assert table.column("admitted_at").null_count == table.num_rows
    shard = next(commit for commit in committed(earlier, "parent") if commit.name == "000002/rollout.00-001")
    assert shard.metrics["recovered_groups"] == 2  # they lay in the log without the column


def test_the_default_of_an_added_option_is_what_an_earlier_run_has(earlier: str) -> None:
    config = newer_schema().model_validate(recorded(earlier, "parent").model_dump(mode="json"))
    other = config.model_copy(update={"data": config.data.model_copy(update={"max_age": 4})})
    with pytest.raises(RunDiffers, match="max_age is 3 in the ledger, 4 now"), tiny_context(earlier, other, "parent"):
        pass


def test_a_commit_that_its_own_version_would_not_have_made_is_stale(earlier: str) -> None:
    path = Path(earlier, "runs/parent/iterations/000002/reward.00-000.json")
    commit = Commit.from_bytes(path.read_bytes(), "runs/parent/iterations/000002/reward.00-000.json")
    path.write_bytes(commit.model_copy(update={"config_digest": "0" * 64}).to_bytes())
    with pytest.raises(StaleCommits, match=re.escape("000002/reward.00-000: changed: configuration")):
        go_on(earlier, "parent")


def test_terms_that_are_missing_or_altered_are_named(earlier: str) -> None:
    go_on(earlier, "parent")
    path = Path(earlier, "runs/parent/upgrades/000001.json")
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"epoch": 2', b'"epoch": 1'))
    assert "upgrades/000001.json cannot be trusted" in "".join(faults(earlier, "parent"))
    with pytest.raises(Damaged, match=r"upgrades/000001.json cannot be trusted"):
        _ = Ledger.open(open_store(earlier), "parent").terms
    path.unlink()
    found = faults(earlier, "parent")
    assert found
    assert all("upgrades/000001.json is missing, but commit 000002/" in fault for fault in found)


def test_a_ledger_of_another_format_is_refused_in_one_sentence(earlier: str) -> None:
    file = Path(earlier, "runs/parent/run.json")
    fields = json.loads(file.read_text())
    del fields["digest"]
    file.write_bytes(canonical.seal(fields | {"schema_version": FORMAT - 1}))
    refused = CliRunner().invoke(app, ["status", "parent", "--store", earlier])
    assert refused.exit_code == 1
    sentence = f"it has format {FORMAT - 1}, this Cairn reads format {FORMAT}; use the version that wrote it"
    assert sentence in refused.stderr
