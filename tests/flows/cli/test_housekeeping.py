"""`cairn gc | delete`: dry runs change nothing, and nothing goes by mistake."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.opening import open_store
from tests.flows import written_runs
from tests.flows.written_runs import SHARDS, new_run, write_run


def cairn(*arguments: str, store: Ledger, answer: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--store", store.store.url], input=answer)


OPTIONS: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": 13},
    "checkpoint": {"save_interval": 2, "save_retain_interval": 4, "retain_snapshots": 3},
    "eval": {"eval_interval": None},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve iterations, a checkpoint each second, and a lost attempt; its driver has ended."""
    folder = tmp_path_factory.mktemp("written")
    ledger = new_run(str(folder), **OPTIONS)
    write_run(ledger, 12)
    ledger.store.write(ledger.attempt(4, Step.TRAIN).path("lost[bold]\x9b31m"), b"12345")
    assert ledger.lease is not None
    ledger.lease.release(Outcome.STOPPED)
    return folder


@pytest.fixture
def ledger(written: Path, tmp_path: Path) -> Ledger:
    """A copy of it."""
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    return Ledger.open(open_store(str(tmp_path)), "toy")


def test_gc_shows_first_and_removes_what_it_showed(ledger: Ledger) -> None:
    before = ledger.store.find("runs")
    shown = cairn("gc", "toy", store=ledger)
    assert shown.exit_code == 0
    assert "iteration 8: 6 files" in shown.stdout
    assert "lost" in shown.stdout
    assert "can be removed: run `cairn gc toy --apply`" in shown.stdout
    assert ledger.store.find("runs") == before
    assert "/lost[bold]\\x9b31m" in shown.stdout
    dry = json.loads(cairn("gc", "toy", "--json", store=ledger).stdout)
    assert (dry["removed"], [row["bytes"] for row in dry["garbage"]]) == (False, [5])
    assert {row["iteration"] for row in dry["retention"] if row["kind"] == "snapshots"} == set(range(9))

    applied = json.loads(cairn("gc", "toy", "--apply", "--json", store=ledger).stdout)
    assert applied == dry | {"removed": True}
    gone = {path for row in dry["retention"] for path in row["files"]} | {row["path"] for row in dry["garbage"]}
    left = {path for path in ledger.store.find("runs") if "/retired/" not in path}
    assert left == set(before) - gone
    assert cairn("gc", "toy", store=ledger).stdout == "run toy: 0 files, 0 B, can be removed\n"


def test_verify_calls_retired_files_retired(ledger: Ledger) -> None:
    cairn("gc", "toy", "--apply", store=ledger)
    verified = cairn("verify", "toy", store=ledger)
    assert verified.exit_code == 0
    assert "(54 older files are retired) read; every byte is what was committed" in verified.stdout
    assert "groups of 9 iterations from 0 to 8 could not be checked: their tables are retired\n" in verified.stdout
    shown = cairn("show", "toy@3", store=ledger)
    assert shown.exit_code == 1
    assert "is retired: run 'toy' deletes its older files" in shown.stderr


@pytest.mark.parametrize("iterations", [{0}, {0, 11}])
def test_diff_names_what_is_retired_and_goes_on(
    ledger: Ledger, iterations: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    table_of = written_runs.rollout_table

    def otherwise(iteration: int, groups: Sequence[int], version: int) -> pa.Table:
        table = table_of(iteration, groups, version)
        place, field = table.schema.get_field_index("response_text"), table.schema.field("response_text")
        texts = pa.array(["other"] * table.num_rows)
        return table.set_column(place, field, texts) if iteration in iterations else table

    monkeypatch.setattr(written_runs, "rollout_table", otherwise)
    write_run(new_run(ledger.store, "other", **OPTIONS), 12)
    cairn("gc", "toy", "--apply", store=ledger)
    shown, parts = cairn("diff", "toy", "other", store=ledger), 11 in iterations
    assert shown.exit_code == int(parts), shown.output
    assert "000000/rollout.00-000: samples.parquet has another digest, and its rows cannot be compared: runs/toy/" in (
        shown.stdout
    )
    assert ("toy and other first differ at 000011/rollout.00-000" in shown.stdout) == parts
    assert ("toy and other are equal in everything that is stored" in shown.stdout) != parts
    found = json.loads(cairn("diff", "toy", "other", "--json", store=ledger).stdout)
    assert found["parts_at"] == ("000011/rollout.00-000" if parts else None)
    assert [sentence.partition(":")[0] for sentence in found["retired"]] == [f"000000/rollout.{s}" for s in SHARDS]
    assert all("is retired: run 'toy' deletes its older files" in sentence for sentence in found["retired"])


@pytest.mark.parametrize("arguments", [["--yes-delete", "to"], []])
def test_delete_wants_the_exact_name_again(ledger: Ledger, arguments: list[str]) -> None:
    refused = cairn("delete", "toy", *arguments, store=ledger, answer="y\n")
    assert refused.exit_code == 2
    assert "not 'toy'; nothing was deleted" in refused.stderr
    assert Ledger.open(ledger.store, "toy").last_iteration() == 11


@pytest.mark.parametrize(("arguments", "answer"), [(["--yes-delete", "toy"], None), ([], "toy\n")])
def test_delete_leaves_nothing(ledger: Ledger, arguments: list[str], answer: str | None) -> None:
    done = cairn("delete", "toy", *arguments, store=ledger, answer=answer)
    assert done.exit_code == 0, done.stderr
    assert ledger.store.find("runs") == {}


def test_delete_is_refused_with_a_sentence(ledger: Ledger) -> None:
    Ledger.create(ledger.store, "branch", ledger.manifest.config, parent=Parent(run="toy", iteration=3))
    shared = cairn("delete", "toy", "--yes-delete", "toy", store=ledger)
    assert (shared.exit_code, "branch (up to iteration 3)" in shared.stderr) == (2, True)
    other = new_run(ledger.store, "other")
    denied = cairn("delete", "other", "--yes-delete", "other", store=other)
    assert (denied.exit_code, "run 'other' is driven by pid" in denied.stderr) == (2, True)
    absent = cairn("delete", "none", "--yes-delete", "none", store=ledger)
    assert (absent.exit_code, "there is no run 'none'" in absent.stderr) == (2, True)


def test_a_half_deleted_run_is_shown_as_such_and_nothing_goes_on_with_it(ledger: Ledger) -> None:
    from cairn.storage.store import canonical

    note = canonical.seal({"run": "toy", "being_deleted_since": 1.0})
    ledger.store.write(layout.run_manifest("toy"), note)
    (status,) = json.loads(cairn("runs", "--json", store=ledger).stdout)
    assert status["state"] == "deleted"
    for command in ("resume", "status", "verify", "gc"):
        refused = cairn(command, "toy", store=ledger)
        assert (refused.exit_code, "`cairn delete toy` resumes it" in refused.stderr) == (2, True), command
    assert cairn("delete", "toy", "--yes-delete", "toy", store=ledger).exit_code == 0
