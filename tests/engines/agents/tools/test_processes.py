"""Plain functions in tool processes: whatever one does ends its own call, is bounded, and is told by its name."""

import asyncio
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import cairn
from cairn.configs.plugins import load_callable
from cairn.engines.agents.tools.errors import Reason
from cairn.engines.agents.tools.processes import ToolProcesses, Turns, allow_network
from tests.engines.agents.tools import bad_tools


def run(tool: cairn.Tool, key: str = "k", **arguments: Any) -> Any:
    return asyncio.run(tool.run(arguments, key))


def test_a_function_of_a_module_runs_in_another_process_that_stays():
    mine = psutil.Process().pid
    first, second = run(bad_tools.pid), run(bad_tools.pid)
    assert first == second != mine


def test_a_tool_of_a_file_runs_there_too(tmp_path):
    (tmp_path / "own.py").write_text(
        "import os, cairn\n\n@cairn.tool(kind='pure')\ndef where() -> list:\n    return [__name__, os.getpid()]\n"
    )
    tool = load_callable(f"{tmp_path}/own.py:where")
    name, pid = run(tool)
    assert name == tool.__module__
    assert pid != psutil.Process().pid


def test_its_key_is_given(tmp_path):
    assert run(bad_tools.note, key="of-the-call", path=str(tmp_path / "notes")) == "of-the-call"
    assert (tmp_path / "notes").read_text() == "of-the-call\n"


@pytest.mark.parametrize(
    ("tool", "reason", "told"),
    [
        (bad_tools.divide, Reason.RAISED, "divide: ZeroDivisionError: float division by zero"),
        (bad_tools.leave, Reason.RAISED, "leave: SystemExit: 3"),
        (bad_tools.exit_at_once, Reason.DIED, "exit_at_once: it ended its process, with exit code 7"),
        (bad_tools.segfault, Reason.DIED, "segfault: it ended its process, with SIGSEGV"),
        (bad_tools.compute, Reason.DEADLINE, "compute: it took longer than 0.3 s"),
        (bad_tools.hoard, Reason.MEMORY, "hoard: MemoryError"),
        (bad_tools.gigabytes, Reason.SIZE, "gigabytes: it returned more than the 16,384 characters that it may"),
        (bad_tools.raw, Reason.TYPE, "raw: it returned a value of type bytes"),
        (bad_tools.other, Reason.TYPE, "other: it returned a value of type set"),
        (bad_tools.silent, Reason.DIED, "silent: it ended its process"),
        (bad_tools.add, Reason.ARGUMENTS, "add: a is missing; b is missing (it takes a, b)"),
    ],
    ids=lambda value: value.name if isinstance(value, cairn.Tool) else "",
)
def test_what_goes_wrong_is_told_and_harms_no_other_call(tool, reason, told):
    arguments = {"a": 1, "b": 0} if tool is bad_tools.divide else {}

    async def beside() -> tuple[Any, ...]:
        return await asyncio.gather(
            tool.run(arguments, "k"), bad_tools.add.run({"a": 1, "b": 2}, "l"), return_exceptions=True
        )

    failed, result = asyncio.run(beside())
    assert isinstance(failed, cairn.ToolFailed)
    assert str(failed).startswith(told)
    assert failed.reason == reason
    assert result == 3
    assert run(bad_tools.add, a=3, b=4) == 7


def test_a_gigabyte_of_text_is_cut_where_it_is():
    before = psutil.Process().memory_info().rss
    result = run(bad_tools.gigabyte)
    assert result == "x" * 16_384 + "\n[999,983,616 more characters left out]"
    assert psutil.Process().memory_info().rss - before < 2**27


@pytest.mark.proof
def test_what_a_late_call_has_started_ends_with_it(tmp_path):
    with pytest.raises(cairn.ToolFailed, match=r"longer than 1\.5 s"):
        run(bad_tools.start_others, path=str(tmp_path / "pids"))
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    for pid in pids:
        gone(int(pid))


def test_what_a_call_leaves_behind_ends_when_it_has_answered(tmp_path):
    assert run(bad_tools.leave_a_process, path=str(tmp_path / "pid")) == "done"
    gone(int((tmp_path / "pid").read_text()))


def test_one_that_forks_answers_once():
    assert run(bad_tools.fork_and_return) == "parent"
    assert run(bad_tools.add, a=1, b=1) == 2


def test_a_pure_call_whose_process_is_ended_from_outside_is_made_again(tmp_path):
    assert run(bad_tools.killed, path=str(tmp_path / "tries"), times=1) == 2
    with pytest.raises(cairn.ToolUnavailable, match="killed: its process was ended from outside 3 times"):
        run(bad_tools.killed, path=str(tmp_path / "more"), times=9)
    assert (tmp_path / "more").read_text() == "xxx"


def test_one_with_effects_is_not(tmp_path):
    with pytest.raises(cairn.ToolLost, match="killed_with_effects: its process was ended from outside"):
        run(bad_tools.killed_with_effects, path=str(tmp_path / "tries"))
    assert (tmp_path / "tries").read_text() == "x"


def test_a_call_that_is_given_up_frees_its_process():
    async def give_up() -> float:
        late = cairn.Tool(bad_tools.compute.function, kind="pure", timeout=60)
        tasks = [asyncio.create_task(late.run({}, "k")) for _ in range(8)]
        await asyncio.sleep(0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        began = time.monotonic()
        assert await bad_tools.add.run({"a": 1, "b": 2}, "k") == 3
        return time.monotonic() - began

    assert asyncio.run(give_up()) < 20


@pytest.mark.proof
@pytest.mark.parametrize(
    ("stuck", "good"),
    [(bad_tools.hang, bad_tools.hang), (bad_tools.compute_on, bad_tools.add)],
    ids=["hang", "compute"],
)
def test_stuck_calls_hold_no_other_up(stuck, good, tmp_path):
    begun = tmp_path / "begun"
    begun.touch()
    arguments = {"path": os.devnull, "seconds": 0} if good is stuck else {"a": 1, "b": 2}

    async def beside() -> None:
        tasks = [asyncio.create_task(stuck.run({"path": str(begun)}, f"r/0/{i}/c0")) for i in range(8)]
        while not begun.read_text():
            await asyncio.sleep(0.01)
        await asyncio.wait_for(good.run(arguments, "r/0/8/c0"), 25)
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(beside())


@pytest.mark.slow
def test_an_episode_that_asks_for_much_holds_no_other_up(tmp_path):
    """Of the same tool."""

    async def beside() -> list[int]:
        greedy = [asyncio.create_task(bad_tools.nap.run({"seconds": 0.05}, f"r/0/0/t{i}.c0")) for i in range(100)]
        await greedy[0]
        await asyncio.gather(*(bad_tools.nap.run({"seconds": 0}, f"r/0/{i}/c0") for i in range(1, 4)))
        waiting = sum(not task.done() for task in greedy)
        await asyncio.gather(*greedy)
        return waiting

    assert asyncio.run(beside()) > 50


def test_tools_take_turns_and_their_episodes():
    turns = Turns[str]()
    for tool, episode, call in [
        ("a", "1", "a1"),
        ("a", "1", "a1'"),
        ("a", "2", "a2"),
        ("b", "1", "b1"),
        ("b", "3", "b3"),
    ]:
        turns.add(tool, episode, call)
    assert turns.take(lambda tool, episode: episode == "2") == "a2"
    assert turns.take(lambda tool, episode: tool == "c") is None
    assert [turns.take(lambda tool, episode: True) for _ in range(5)] == ["b1", "a1", "b3", "a1'", None]


def test_what_cannot_be_loaded_there_is_unavailable(tmp_path):
    file = tmp_path / "once.py"
    file.write_text("import cairn\n\n@cairn.tool(kind='pure')\ndef one() -> int:\n    return 1\n")
    tool = load_callable(f"{file}:one")
    file.write_text("raise OSError('not here')\n")
    with pytest.raises(cairn.ToolUnavailable, match="one: its process cannot load it"):
        run(tool)


def gone(pid: int) -> None:
    """Wait until a process has ended."""
    end = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_importing_the_worker_is_light():
    """Each process is started fresh, also after each call that goes wrong."""
    import subprocess
    import sys

    code = "import sys, json, cairn.engines.agents.tools.worker; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not {"torch", "numpy", "ray", "transformers"} & set(loaded)
    assert Path(cairn.engines.agents.tools.__file__).exists()  # type: ignore[attr-defined]


def test_a_tool_reaches_a_network_where_that_is_granted_alone(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def reached() -> bool:
            tool = cairn.Tool(bad_tools.connects, kind="pure")
            pool = ToolProcesses(1)
            path = "tests.engines.agents.tools.bad_tools.connects"
            return bool(asyncio.run(pool.call(tool, path, {"port": port}, "e/c0")))

        assert not reached()
        allow_network(True)
        try:
            assert reached()
        finally:
            allow_network(False)
