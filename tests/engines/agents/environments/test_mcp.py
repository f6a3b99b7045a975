"""Tools of MCP servers made with the official SDK: what they answer, and that one that misbehaves is named."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import cairn
from cairn.engines.processes.ports import free_port
from tests.engines.agents.environments.serving import serving

SERVER = str(Path(__file__).with_name("mcp_server.py"))
STDIO = [sys.executable, SERVER, "stdio"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    port = free_port()
    with serving([sys.executable, SERVER, "http", str(port)], port):
        yield f"http://127.0.0.1:{port}/mcp"


async def answer(tool: cairn.Tool, **arguments: Any) -> Any:
    """What a call returns, or the error that it ends in."""
    try:
        return await tool.run(arguments, "key")
    except Exception as error:
        return error


def test_tools_of_a_process_are_what_the_server_says_of_them() -> None:
    async def run() -> None:
        async with cairn.mcp(command=STDIO) as tools:
            assert set(tools) == {"add", "count", "fail", "flood", "end", "hang"}
            add = tools["add"]
            assert (add.kind, add.description) == ("effects", "The sum.")
            assert set(add.parameters["properties"]) == {"a", "b"}
            assert await answer(add, a=2, b=3) == "5"
            assert [await answer(tools["count"]) for _ in range(2)] == ["1", "2"]
            failed = await answer(tools["fail"])
            assert isinstance(failed, cairn.ToolFailed)
            assert "there is no such page" in str(failed)
            assert isinstance(await answer(add, a="two", b=3), cairn.ToolFailed)

    asyncio.run(run())


def test_hints_are_believed_where_the_server_is_trusted() -> None:
    async def run() -> None:
        async with cairn.mcp(command=STDIO, trust_hints=True, prefix="n_") as tools:
            assert tools["n_add"].kind == "pure"
            assert tools["n_count"].kind == "effects"

    asyncio.run(run())


@pytest.mark.proof
def test_a_late_call_is_given_up_and_the_server_goes_on() -> None:
    async def run() -> None:
        async with cairn.mcp(command=STDIO, timeout=3) as tools:
            late = await answer(tools["hang"])
            assert isinstance(late, cairn.ToolFailed)
            assert str(late) == "hang: it took longer than 3 s"
            assert await answer(tools["count"]) == "1"

    asyncio.run(run())


@pytest.mark.proof
def test_a_server_that_ends_or_floods_fails_the_sample_by_name() -> None:
    async def run() -> None:
        for name, why in (("end", "ended with exit code 3 (out of luck)"), ("flood", "more than 1,048,576 bytes")):
            async with cairn.mcp(command=STDIO) as tools:
                lost = await answer(tools[name])
                assert isinstance(lost, cairn.ToolLost)
                assert "mcp_server.py" in str(lost)
                assert why in str(lost)
                gone = await answer(tools["count"])
                assert isinstance(gone, cairn.ToolUnavailable)
                assert not isinstance(gone, cairn.ToolLost)
                assert why in str(gone)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("command", "why"),
    [(["/no/such/server"], "No such file"), ([sys.executable, "-c", "import sys; sys.exit('no key')"], "no key")],
)
def test_a_server_that_does_not_start_is_named(command: list[str], why: str) -> None:
    async def run() -> None:
        with pytest.raises(cairn.ToolUnavailable, match=f"the MCP server {command[0]}.*{why}"):
            async with cairn.mcp(command=command):
                pass

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_ends_with_its_episode_or_is_shared_until_the_work_ends() -> None:
    async def run() -> None:
        async with cairn.mcp(command=STDIO) as tools:
            assert await answer(tools["count"]) == "1"
            assert len(servers()) == 1
        assert servers() == []
        for expected in ("1", "2"):
            async with cairn.mcp(command=STDIO, shared=True) as tools:
                assert await answer(tools["count"]) == expected

    asyncio.run(run())
    assert servers() == []


def servers() -> list[psutil.Process]:
    result = []
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if SERVER in process.cmdline() and "stdio" in process.cmdline():
                result.append(process)
    return result


def test_what_cannot_be_is_refused() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="either the command"):
            async with cairn.mcp():
                pass
        with pytest.raises(ValueError, match="cannot rebuild the state of a shared server"):
            async with cairn.mcp(command=STDIO, shared=True, kind="deterministic"):
                pass

    asyncio.run(run())


@pytest.mark.slow
def test_a_server_is_spoken_to_by_http(url: str) -> None:
    async def run() -> None:
        async with cairn.mcp(url=url, timeout=3) as tools:
            assert await answer(tools["add"], a=2, b=3) == "5"
            assert isinstance(await answer(tools["fail"]), cairn.ToolFailed)
            assert str(await answer(tools["hang"])) == "hang: it took longer than 3 s"
            flooded = await answer(tools["flood"])
            assert isinstance(flooded, cairn.ToolLost)
            assert f"the MCP server {url}" in str(flooded)
            assert "more than 1,048,576 bytes" in str(flooded)

    asyncio.run(run())


def test_a_server_that_is_not_there_is_named() -> None:
    async def run() -> None:
        with pytest.raises(cairn.ToolUnavailable, match=r"the MCP server http://127\.0\.0\.1:9/mcp"):
            async with cairn.mcp(url="http://127.0.0.1:9/mcp"):
                pass

    asyncio.run(run())
