"""Where commands write: places that cannot be written, and terminals that know no Unicode."""

import errno
import io
import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from cairn.configs.errors import BadInput
from cairn.flows.cli import app
from cairn.flows.cli.command import writing
from cairn.flows.cli.printing import print_json
from tests.flows.written_runs import new_run, write_iteration
from tests.tables import cases


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_iteration(new_run(str(tmp_path / "store")), 0)
    return tmp_path / "store"


@cases(
    "command",
    [
        ("report", "toy", "/proc/r.html"),
        ("export", "toy@0", "/proc/out", "--format", "atif"),
        ("timeline", "toy@0", "/proc/trace.json"),
    ],
)
def test_a_place_that_cannot_be_written_is_one_sentence(store: Path, command: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*command, "--store", str(store)])
    assert result.exit_code == 2, result.exception
    place = next(one for one in command if one.startswith("/proc/"))
    assert f"{place} cannot be written: " in result.stderr
    assert result.stderr.endswith("; use another path\n")


def test_what_cannot_be_read_elsewhere_is_no_fault_of_the_place(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), writing(tmp_path / "out"):
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "runs" / "commit"))
    for file in (tmp_path, tmp_path / "out" / "a", tmp_path / ".out-xyz" / "out"):
        with pytest.raises(BadInput), writing(tmp_path / "out"):
            raise PermissionError(errno.EACCES, "Permission denied", str(file))


def test_a_terminal_without_unicode_is_told_all_that_it_can_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises((SystemExit, typer.Exit)):
        app(["no-such-command-\u2192"])
    print_json({"a": "\u2192"})
    print("\u2192")
    sys.stdout.flush()
    output = sys.stdout.buffer.getvalue().decode("ascii")  # type: ignore[attr-defined]
    assert json.loads(output[: output.rindex("}") + 1]) == {"a": "\u2192"}
    assert output.endswith("?\n")
