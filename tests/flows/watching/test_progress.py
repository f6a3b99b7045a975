"""The terminal shows a line an iteration, and what is going on now."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from cairn.engines.processes.child import output_file
from cairn.flows.events import Event, IterationDone, RunDone, RunStarted
from cairn.flows.watching.progress import Progress, sparkline
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted
from tests.flows.written_runs import config_of, new_run, write_iteration


def events(ledger: Ledger, iterations: int) -> list[Event]:
    shown: list[Event] = [RunStarted("toy", 1, 0, 3)]
    for iteration in range(iterations):
        commits = write_iteration(ledger, iteration)
        for commit in commits:
            shown += [StepStarted(iteration, commit.step, commit.shard), StepCommitted(commit)]
        shown.append(IterationDone(iteration, tuple(commits)))
    return shown


def printed(ledger: Ledger, shown: list[Event], terminal: bool = False) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    with Progress(config_of(ledger), console) as progress:
        for event in shown:
            progress(event)
    return console.file.getvalue()


def test_without_a_terminal_every_iteration_is_one_plain_line(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    shown = [*events(ledger, 2), Message("an engine restarted [x]", "warning"), RunDone("toy", 2, "abc")]
    lines = printed(ledger, shown).splitlines()
    assert lines.pop(0) == "starting"
    assert lines[0] == "run toy: starting at iteration 0 of 3"
    assert lines[1].startswith("[1/3] iteration 0  reward 0.667  ")
    assert "tokens/s" in lines[1]
    assert "rollout 0." in lines[1]
    assert "other 0." in lines[1]
    assert lines[2].strip() == "heldout 0.250 after 0 iterations"
    assert lines[3].startswith("[2/3] iteration 1  reward 0.667  ")
    assert lines[4].strip() == "heldout 0.750 after 2 iterations"
    assert lines[5:] == ["an engine restarted [x]", "run toy: done; weight version 2, state abc"]
    assert "\x1b" not in "".join(lines)


def test_a_file_into_which_user_code_prints_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ledger = new_run(str(tmp_path))
    before = output_file("before.py:grade")
    before.parent.mkdir(parents=True)
    before.write_text("of an earlier run")
    console = Console(file=io.StringIO(), width=100)
    with Progress(config_of(ledger), console) as progress:
        for event in events(ledger, 2):
            progress(event)
            output_file("my/rewards.py:grade").write_text("seen")
    assert console.file.getvalue().count("code of yours prints into .cairn/output/rewards.py-grade.log\n") == 1
    assert "before.py" not in console.file.getvalue()


def test_what_a_store_says_steers_no_terminal(tmp_path: Path) -> None:
    shown = Message("device was \x1b[31mA\x9b31m, is B", "warning")
    assert "device was \\x1b[31mA\\x9b31m, is B" in printed(new_run(str(tmp_path)), [shown])


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path) -> None:
    assert "run toy: continuing at iteration 2 of 3" in printed(new_run(str(tmp_path)), [RunStarted("toy", 2, 2, 3)])


def test_a_terminal_shows_the_step_at_work_the_share_of_time_and_what_is_left(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    text = printed(ledger, [*events(ledger, 1), StepStarted(1, Step.ROLLOUT, "00-001")], terminal=True)
    assert "rollout 00-001 0 s" in text
    assert "1/3" in text
    assert "s left" in text
    assert " %" in text


def test_a_sparkline_spans_the_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
