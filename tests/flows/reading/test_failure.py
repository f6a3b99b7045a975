"""Why a run failed, as its ledger has it: the commonest error, and commands that go on."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
import typer

from cairn.configs.errors import BadInput
from cairn.flows.cli.command import Root
from cairn.flows.cli.failing import ending_in_box
from cairn.flows.reading.failure import RunFailure, Terminal
from cairn.flows.reading.views import run_status
from cairn.flows.text import printable
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import VARIABLES, DriverFailure, Holder, Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from cairn.tasks.grading.failures import common_error
from tests.commands import cairn
from tests.flows.written_runs import SHARDS, new_run, reward_table, write_iteration, write_run
from tests.storage.builders import commit_step


def failed(ledger: Ledger, kind: str, error: str, **fields: object) -> RunFailure:
    """Return why a run failed whose driver ended with an error."""
    assert ledger.lease is not None
    ledger.lease.release(Outcome.FAILED, DriverFailure.model_validate({"kind": kind, "error": error, **fields}))
    failure = run_status(ledger.store, ledger.run).failure
    assert failure is not None
    return failure


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a process that `cairn train` started there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    typed = "/bin/cairn train mine.yaml --set seed=1 --store . --takeover --run=toy"
    monkeypatch.setattr(sys, "argv", typed.split())
    return tmp_path


def of_samples(*errors: str | None) -> pa.Table:
    return pa.table({"status": ["failed" if error else "completed" for error in errors], "error": list(errors)})


def test_errors_of_one_type_at_one_place_are_one_error() -> None:
    found = common_error(
        [
            of_samples("KeyError: 'a' (g.py:4)", "KeyError: 'b' (g.py:4)", "ValueError: c (g.py:9)", None),
            of_samples("a sample of its group failed: KeyError: 'b' (g.py:4)", "ValueError: c (g.py:9)"),
        ]
    )
    assert found is not None
    assert (found.error, found.place) == ("KeyError: 'b'", "g.py:4")
    assert (found.count, found.failed, found.total, found.will_recur) == (3, 5, 6, False)
    assert common_error([of_samples(None)]) is None


def test_code_that_fails_in_every_sample_leads_to_a_fork_or_without_a_trained_iteration_to_another_run(
    started: Path,
) -> None:
    for complete, following in (
        (2, ["cairn fork toy-0@1 toy-2", "cairn resume toy-2"]),
        (0, ["cairn train mine.yaml --set seed=1 --run toy-2"]),
    ):
        ledger = new_run(str(started), "toy-0" if complete else "toy")
        write_run(ledger, complete)
        rollouts = write_iteration(ledger, complete, until=Step.REWARD)[-len(SHARDS) :]
        for (shard, groups), rollout in zip(SHARDS.items(), rollouts, strict=True):
            table = reward_table(complete, groups)
            errors = [f"KeyError: {row} (rewards.py:7)" for row in range(table.num_rows)]
            for name, values in {"status": ["failed"] * table.num_rows, "error": errors}.items():
                place = table.schema.get_field_index(name)
                table = table.set_column(
                    place, table.schema.field(name), pa.array(values, table.schema.field(name).type)
                )
            metrics = {"failed_samples": table.num_rows}
            commit_step(ledger, complete, Step.REWARD, shard, inputs=(rollout,), table=table, metrics=metrics)
        found = run_status(ledger.store, ledger.run).failed_samples
        advice = "correct rewards.py:7, and fork the run or start another: a run cannot change its code"
        failure = failed(ledger, "BatchNotFilled", f"iteration {complete}: {found}", advice=advice)
        assert failure.what == f"iteration {complete}: 6 of 6 samples failed"
        assert failure.commonest == found
        assert failure.advice == "correct rewards.py:7"
        assert list(failure.next) == following
        shown = cairn("status", ledger.run).stdout
        assert "commonest error   KeyError: 0 at rewards.py:7, 6 of 6 samples\n" in shown
        assert f"next              {following[0]}\n" in shown
    assert "iteration 0: 6 of 6 samples failed: KeyError: 0 at rewards.py:7" in cairn("runs").stdout
    words = shlex.split(following[0])[1:]
    assert words[:2] == ["train", "mine.yaml"]


@pytest.mark.parametrize(
    ("kind", "error", "step", "following"),
    [
        ("EngineDied", "engine 0 is gone", "rollout", ["cairn resume toy"]),
        ("EngineError", "DefaultCPUAllocator: can't allocate memory", "train",
         ["cairn resume toy", "cairn fork toy@0 toy-2 --set training.max_tokens_per_gpu=8192", "cairn resume toy-2"]),
        ("NotFinite", "the loss is nan", "train",
         ["cairn fork toy@0 toy-2 --set training.lr=1e-07", "cairn resume toy-2"]),
        ("Damaged", "runs/toy/x is missing", None, ["cairn verify toy"]),
        ("LeaseLost", "taken over", None, ["cairn status toy"]),
    ],
)  # fmt: skip
def test_the_next_command_is_that_of_the_error(
    started: Path, kind: str, error: str, step: str | None, following: list[str]
) -> None:
    ledger = new_run(str(started))
    write_run(ledger, 1)
    where = {} if step is None else {"iteration": 1, "step": step, "shards": 2, "tries": 3}
    failure = failed(ledger, kind, error, **where)
    assert [*failure.next, *failure.instead] == following
    assert failure.stands == "iteration 0, weight version 1"
    if step is not None:
        assert failure.commonest is not None
        assert (failure.commonest.count, failure.commonest.unit) == (2, f"shards of {step}")


def test_a_run_of_code_that_a_store_may_not_name_goes_on_with_its_recipe(started: Path) -> None:
    ledger = new_run(str(started))
    failure = failed(ledger, "StoreError", "no answer", resumable=False)
    assert list(failure.next) == ["cairn train mine.yaml --set seed=1 --run toy"]


def test_a_command_names_the_folder_the_variables_and_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = Terminal(f"{tmp_path}/a b/store", f"{tmp_path}/a b", {"PYTHONPATH": "x y"})
    assert other.line("cairn", "resume", "toy") == (
        f"cd '{tmp_path}/a b' && PYTHONPATH='x y' cairn resume toy --store store"
    )
    assert Terminal(os.getcwd(), os.getcwd()).line("cairn", "resume", "toy") == "cairn resume toy"
    with monkeypatch.context() as patch:
        patch.setenv("CAIRN_STORE", "s3://elsewhere")
        assert Terminal(os.getcwd()).line("cairn", "runs") == f"cairn runs --store {os.getcwd()}"
    assert Terminal("s3://b/x").line("cairn", "runs") == "cairn runs --store s3://b/x"
    forged = Holder.this_process().model_copy(update={"variables": {"LD_PRELOAD": "x", "PYTHONPATH": "y"}})
    assert Terminal.of(open_store(str(tmp_path)), forged).line("cairn", "runs") == "PYTHONPATH=y cairn runs"


def test_a_command_with_control_characters_prints_as_it_is_typed() -> None:
    words = ["a b", "it's", "two\nlines", "\x1b[31m it's \\\x9b", "é"]
    line = Terminal(os.getcwd(), os.getcwd()).line("printf", "%s|", *words)
    assert printable(line) == line
    assert "\n" not in line
    assert subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout == "".join(
        f"{w}|" for w in words
    )


class _Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (_Broken(), 1, "what happened  _Broken: its message cannot be read\n"),
        (KeyError("k"), 1, "what happened  KeyError: 'k'\n"),
        (RuntimeError(), 1, "what happened  RuntimeError\n"),
        (BadInput("x" * 10**6 + "\x1b"), 2, "x… and 992,001 characters more\n"),
        (BadInput("a\x1b[31m"), 2, "what happened  a\\x1b[31m\n"),
    ],
)
def test_every_error_ends_in_a_box(
    error: Exception,
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(typer.Exit) as ended, ending_in_box(Root(str(tmp_path)), "toy", ["cairn", "resume", "toy"]):
        raise error
    box = capsys.readouterr().err.partition("━━ run toy did not start")[2]
    assert (ended.value.exit_code, says in box) == (code, True)
    assert f"  cairn resume toy --store {tmp_path}\n" in box


@pytest.mark.parametrize("url", ["s3://KEY:hidden@b/x", "s3://b/x?aws_secret_access_key=hidden"])
def test_the_next_command_has_no_keys_of_a_store(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), ending_in_box(Root(url), "toy", ["cairn", "resume", "toy"]):
        raise BadInput("no")
    printed = capsys.readouterr().err
    assert "hidden" not in printed
    assert "cairn resume toy --store s3://b/x\n" in printed
