"""Every command of docs/audit.md works, on any run, and prints what the page shows of it: its columns, its lines."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.flows.cli import app
from tests.flows.written_runs import new_run, write_run

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
SHOWN = re.findall(r"```\n(cairn .*?)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
NAMED = [
    command
    for command in re.findall(r"`(cairn [^`]+)`", PAGE)
    if command.count(" ") > 1 and ("@" not in command or "lineage" in command)
]
SAMPLE = {"5": "1", "170": "4", "3": "1", "7": "0"}
"""Iteration, group, sample and token of the page, and those of the run here."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("store"))
    write_run(new_run(folder, "quickstart"), 3)
    return folder


def printed(command: str, store: str) -> list[str]:
    _, name, *rest = shlex.split(command.replace("\\\n", ""))
    arguments = [re.sub(r"(?<=[@/])\d+|^\d+$", lambda number: SAMPLE.get(number[0], number[0]), word) for word in rest]
    result = CliRunner().invoke(app, [name, *arguments, "--store", store])
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_the_page_answers_twelve_questions() -> None:
    assert len(re.findall(r"^## \d+\. .*\?$", PAGE, re.MULTILINE)) == len(SHOWN) == 12
    assert sum(command.startswith("cairn lineage") for command, _ in SHOWN) >= 1


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=lambda text: text[:40])
def test_a_command_prints_what_the_page_shows(
    command: str, output: str, store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines, shown = printed(command, store), output.splitlines()
    if command.startswith("cairn sql"):
        assert lines[0].split() == shown[0].split()
        assert len(shown) > 1
    else:
        names = [re.split(r"  +", line)[0] for line in lines]
        assert [re.sub(r"\d+", "N", name) for name in names] == [
            re.sub(r"\d+", "N", re.split(r"  +", line)[0]) for line in shown
        ]


@pytest.mark.parametrize("command", sorted(set(NAMED)))
def test_a_command_in_the_text_works(command: str, store: str) -> None:
    assert printed(command, store)
