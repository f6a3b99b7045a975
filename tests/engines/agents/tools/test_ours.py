"""The tools of ours: what they answer, and what they cannot be made to do."""

import asyncio
import json
import os
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import cairn
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.rollout import ToolOptions
from cairn.engines.agents.tools.errors import Reason
from cairn.engines.agents.tools.tool import load_tools
from tests.tables import cases


def tools(*names: str, **options: Any) -> dict[str, cairn.Tool]:
    return load_tools(names, ToolOptions.model_validate(options))


def run(tool: cairn.Tool, **arguments: Any) -> Any:
    return asyncio.run(tool.run(arguments, "k"))


def failure(tool: cairn.Tool, **arguments: Any) -> cairn.ToolFailed:
    with pytest.raises(cairn.ToolFailed) as failed:
        run(tool, **arguments)
    assert str(failed.value).startswith(f"{tool.name}: ")
    return failed.value


@cases(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(1 + 2) / 4", "0.75"),
        ("0.1 + 0.2", "0.3"),
        ("10 / 5", "2"),
        ("2 ^ 10 − 24", "1000"),
        ("7 // 2 % 2", "1"),
        ("-3 × 2 ÷ 4", "-1.5"),
        ("sqrt(2) * max(3, 4)", "5.65685424949"),
        ("round(pi, 2)", "3.14"),
        ("round(pi)", "3"),
        ("round(1234, -2)", "1200"),
        ("2 ** 100", str(2**100)),
    ],
)
def test_the_calculator_computes(expression, value):
    assert run(tools("calculator")["calculator"], expression=expression) == value


@cases(
    ("expression", "told"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("9 ** 9 ** 9 ** 9", "too large"),
        ("(2 ** 3000) * (2 ** 3000)", "too large"),
        ("'a' * 3", "only numbers"),
        ("__import__('os').system('x')", ""),
        ("(1).__class__", ""),
        ("1 +", ""),
        ("", ""),
        ("1" * 1001, "1000 characters at most"),
        ("1 < 2", ""),
        ("(-8) ** 0.5", "no number"),
        ("[1] * 10 ** 9", ""),
        ("x + 1", "x"),
        ("round(7, -10**9)", "1000 at most"),
        ("round(7, 10**9)", "1000 at most"),
        ("round(7, 1.5)", "1000 at most"),
        ("2 ** 4095 + 2 ** 4095", "too large"),
        ("f'{1:>999999999}'", ""),
        ("f'{1:.999999999f}'", ""),
        ("-" * 999 + "1", ""),
        ("(" * 999, ""),
        ("a." * 499 + "a", ""),
        ("+".join("(" * 90 + "1" + ")" * 90 for _ in range(5)), None),
    ],
)
def test_what_is_no_arithmetic_is_told_at_once(expression, told):
    calculator = tools("calculator")["calculator"]
    if told is None:  # deep, and still arithmetic
        assert run(calculator, expression=expression) == "5"
        return
    failed = failure(calculator, expression=expression)
    assert told in str(failed)
    assert failed.reason == Reason.RAISED


def test_python_returns_what_a_program_prints(bwrap):
    python = tools("python", python={"bwrap": bwrap})["python"]
    assert run(python, code="import math\nprint(math.comb(5, 2))") == "10"
    found = run(python, code="print('before')\n1 / 0")
    assert found.startswith("before\nTraceback")
    assert found.endswith("ZeroDivisionError: division by zero\nexit code 1")
    assert run(python, code="print('\\ud800')").endswith("exit code 1")
    assert run(python, code="x = '\ud800'").endswith("exit code 1")


@pytest.mark.proof
def test_programs_are_bounded(bwrap):
    options = {"bwrap": bwrap, "timeout": 1, "memory": 2**27, "file_size": 2**20, "max_output": 100}
    python = tools("python", python=options)["python"]
    assert failure(python, code="while True: pass").reason == Reason.DEADLINE
    assert "longer than 1 s" in str(failure(python, code="import time; time.sleep(60)"))
    assert run(python, code="x = bytearray(2**28)").endswith("MemoryError\nexit code 1")
    assert failure(python, code="while True: print('x' * 1000)").reason == Reason.SIZE
    assert run(python, code="print('x' * 500_000)") == "x" * 100 + "\n[499,900 more characters left out]"
    full = run(python, code="open('/scratch/a', 'w').write('x' * 2**21)")
    assert "File too large" in full or "No space left" in full
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert failure(python, code="import os\nwhile True:\n  try: os.fork()\n  except OSError: pass")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.fixture
def listening() -> Any:
    """A port of this machine, and whether anybody came."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        yield server


@pytest.mark.parametrize("name", ["python", "shell"])
def test_no_program_reaches_a_network_or_the_files_of_this_machine(bwrap, name, listening, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "of the machine")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    port = listening.getsockname()[1]
    program = f"""
import os, socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try: socket.create_connection(address, timeout=2); print("connected")
    except OSError as error: print(type(error).__name__)
for path in ({str(secret)!r}, "/etc/passwd", "/tmp", "/home", {os.getcwd()!r}):
    print(path, os.path.exists(path))
print(os.environ.get("SECRET"), os.getuid(), len([p for p in os.listdir("/proc") if p.isdigit()]) < 6)
try: open("/usr/own", "w")
except OSError as error: print(type(error).__name__)
"""
    tool = tools(name, python={"bwrap": bwrap}, shell={"bwrap": bwrap})[name].for_episode()
    if name == "python":
        found = run(tool, code=program)
    else:
        import sys

        run(tool, command=f"cat > program.py <<'END'\n{program}\nEND")
        found = run(tool, command=f"{os.path.realpath(sys.executable)} -I -S program.py")
    lines = found.splitlines()
    assert lines[:2] == ["ConnectionRefusedError", "OSError"], found
    assert [line.endswith(" False") for line in lines[2:7]] == [True] * 5
    assert lines[7] == "None 65534 True"
    assert lines[8] in ("OSError", "PermissionError")
    with pytest.raises(TimeoutError):
        listening.accept()


def test_each_episode_has_a_shell_with_a_directory_that_stays(bwrap):
    shell = tools("shell", shell={"bwrap": bwrap})["shell"]
    one, other = shell.for_episode(), shell.for_episode()
    assert run(one, command="echo hello > file; mkdir -p a/b; ln -s file a/link; cat file") == "hello"
    assert run(one, command="ls -R; cat file") == ".:\na\nfile\n\n./a:\nb\nlink\n\n./a/b:\nhello"
    assert run(other, command="ls") == ""
    assert run(one, command="cat nowhere") == "cat: nowhere: No such file or directory\nexit code 1"
    assert run(one, command="exit 121") == "exit code 121"
    assert one.kind == "deterministic"


def test_a_command_that_fails_has_not_happened(bwrap):
    shell = tools("shell", shell={"bwrap": bwrap, "timeout": 1, "file_size": 2**20})["shell"].for_episode()
    assert run(shell, command="echo 1 > file") == ""
    assert failure(shell, command="echo 2 > file; sleep 60").reason == Reason.DEADLINE
    assert failure(shell, command="echo 3 > file; cat /dev/zero").reason == Reason.SIZE
    assert failure(shell, command="echo 4 > file; head -c 1048000 /dev/zero > big").reason == Reason.SIZE
    assert failure(shell, command="echo 5\0").reason == Reason.ARGUMENTS
    assert run(shell, command="cat file; ls") == "1\nfile"
    assert run(shell, command="(sleep 60; echo 6 > file) & echo started") == "started"
    assert run(shell, command="cat file") == "1"


def test_a_sandbox_that_is_missing_is_no_answer(tmp_path):
    for name in ("python", "shell"):
        tool = tools(name, **{name: {"bwrap": str(tmp_path / "nowhere")}})[name]
        argument = {"python": "code", "shell": "command"}[name]
        with pytest.raises(cairn.ToolUnavailable, match=rf"set rollout\.tool_options\.{name}\.bwrap"):
            run(tool, **{argument: "1"})


@pytest.mark.proof
def test_a_sandbox_that_is_killed_runs_its_program_again(bwrap):
    python = tools("python", python={"bwrap": bwrap, "timeout": 30})["python"]
    assert run(python, code="print(1)") == "1"  # the first looks whether there are sandboxes, too
    killed = []

    def kill() -> None:
        """The first of them."""
        me = psutil.Process()
        while not killed:
            for child in me.children():
                if child.name() == "bwrap":
                    child.send_signal(signal.SIGKILL)
                    killed.append(child.pid)
                    return

    killer = threading.Thread(target=kill)
    killer.start()
    found = run(python, code="import time; time.sleep(1); print('done')")
    killer.join()
    assert killed
    assert found == "done"


def test_a_sandbox_that_is_killed_while_it_begins_leaves_nobody_to_wait_for(bwrap, tmp_path):
    """bubblewrap's child waits for its parent to map users before it asks to die with it."""
    with tempfile.TemporaryDirectory() as everybodys:  # root's sandbox is begun as nobody
        os.chmod(everybodys, 0o777)
        _begin_and_be_killed(bwrap, tmp_path, Path(everybodys, "orphaned"))


def _begin_and_be_killed(bwrap: str, tmp_path: Path, orphaned: Path) -> None:
    begins = tmp_path / "bwrap"
    begins.write_text(f'#!/bin/sh\nif rm "{orphaned}" 2>&-; then sleep 60 & kill -9 $$; fi\nexec "{bwrap}" "$@"\n')
    begins.chmod(0o755)
    python = tools("python", python={"bwrap": str(begins), "timeout": 30})["python"]
    assert run(python, code="print(1)") == "1"
    orphaned.touch()
    assert run(python, code="print('done')") == "done"
    assert not orphaned.exists()


PASSAGES = [
    {"title": "Herring", "contents": "A small fish that swims in shoals in the cold sea."},
    {"title": "Larch", "contents": "A tree that loses its needles in winter."},
    {"title": "Cairn", "contents": "A heap of stones that shows the way on a mountain."},
]


@pytest.fixture(params=["jsonl", "parquet"])
def corpus(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    file = tmp_path / f"passages.{request.param}"
    if request.param == "jsonl":
        file.write_text("".join(json.dumps(passage) + "\n" for passage in PASSAGES))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(PASSAGES), file)
    return file


def test_search_finds_passages_and_keeps_its_index_beside_the_corpus(corpus):
    options = {"corpus": str(corpus), "text_key": "contents", "title_key": "title", "k": 2}
    search = tools("search", search=options)["search"]
    assert run(search, query="stones on the mountain") == f"[1] Cairn\n{PASSAGES[2]['contents']}"
    assert run(search, query="HERRING!").startswith("[1] Herring\n")
    assert run(search, query="the of and") == run(search, query="zzz") == run(search, query="") == "nothing found"
    (retained,) = corpus.parent.glob("*.bm25-*")
    made = sorted((file.name, file.stat().st_mtime_ns) for file in retained.iterdir())
    repeated = tools("search", search=options)["search"]
    assert run(repeated, query="fish").startswith("[1] Herring\n")
    assert sorted((file.name, file.stat().st_mtime_ns) for file in retained.iterdir()) == made


def test_a_corpus_that_cannot_be_searched_is_told(tmp_path):
    with pytest.raises(BadPlugin, match=r"set rollout\.tool_options\.search\.corpus"):
        tools("search")
    missing = tools("search", search={"corpus": str(tmp_path / "nowhere.jsonl")})["search"]
    with pytest.raises(cairn.ToolUnavailable, match=r"nowhere\.jsonl cannot be read"):
        run(missing, query="x")
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    other = tools("search", search={"corpus": str(tmp_path / "other.jsonl")})["search"]
    with pytest.raises(cairn.ToolUnavailable, match="no column 'text'"):
        run(other, query="x")


def test_tools_of_yours_stand_beside_ours(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import cairn\n\n@cairn.tool(kind='pure')\ndef twice(x: int) -> int:\n    return 2 * x\n")
    found = tools("calculator", f"{file}:twice")
    assert list(found) == ["calculator", "twice"]
    assert run(found["twice"], x=4) == 8
    file = tmp_path / "others.py"
    file.write_text("def plain(x: int) -> int:\n    return x\n")
    with pytest.raises(BadPlugin, match=r"is not a cairn\.Tool"):
        tools(f"{file}:plain")
    with pytest.raises(BadPlugin, match="there is no tool 'abacus': use one of calculator, python, search, shell"):
        tools("abacus")
    with pytest.raises(BadPlugin, match="two tools named 'calculator'"):
        tools("calculator", "calculator")
