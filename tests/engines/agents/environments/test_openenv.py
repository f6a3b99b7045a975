"""Sessions of a server made with OpenEnv itself, from its own environment (`make openenv-env`)."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cairn
from cairn.engines.processes.ports import free_port
from tests.engines.agents.environments.serving import serving

HERE = Path(__file__).resolve().parent
PYTHON = HERE.parents[3] / ".venv-openenv" / "bin" / "python"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-openenv; make it with `make openenv-env`"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server of two sessions."""
    port = free_port()
    with serving([str(PYTHON), str(HERE / "openenv_server.py"), str(port), "2"], port):
        yield f"http://127.0.0.1:{port}"


async def answer(tool: cairn.Tool, **arguments: Any) -> Any:
    """What a call returns, or the error that it ends in."""
    try:
        return await tool.run(arguments, "key")
    except Exception as error:
        return error


def act(env: Any, number: int) -> Any:
    return answer(env.step, action={"n": number})


def test_an_episode_is_reset_and_stepped(url: str) -> None:
    async def run() -> None:
        async with cairn.openenv(url) as env, cairn.openenv(url) as other:
            begun = await answer(env.reset, seed=7)
            assert begun == {"observation": {"metadata": {}, "hint": "0 to 9?"}, "reward": 0.0, "done": False}
            await answer(other.reset, seed=3)
            assert (await act(env, 3))["observation"]["hint"] == "higher"
            assert (await act(other, 3))["done"]
            won = await act(env, 7)
            assert (won["reward"], won["done"]) == (1.0, True)
            assert (await answer(env.state))["step_count"] == 2
            assert {tool.kind for tool in env.tools.values()} == {"deterministic"}

    asyncio.run(run())


def test_what_the_environment_says_of_an_action_is_told_to_the_model(url: str) -> None:
    async def run() -> None:
        async with cairn.openenv(url) as env:
            await answer(env.reset, seed=7)
            for failed, why in (
                (await act(env, -1), "a number below 0"),
                (await answer(env.step, action={"m": 1}), "Field required"),
                (await answer(env.step, action=3), "valid dictionary"),
            ):
                assert isinstance(failed, cairn.ToolFailed)
                assert why in str(failed)
            assert (await act(env, 7))["done"]  # the session goes on

    asyncio.run(run())


def test_a_session_that_broke_is_over_by_name(url: str) -> None:
    async def run() -> None:
        async with cairn.openenv(url, timeout=1) as env:
            early = await act(env, 1)
            assert isinstance(early, cairn.ToolUnavailable)
            assert "step came before a reset" in str(early)
            await answer(env.reset, seed=7)
            flooded = await act(env, -3)
            assert isinstance(flooded, cairn.ToolLost)
            assert str(flooded) == f"the environment at {url}: it sent a message of more than 1,048,576 bytes"
            after = await act(env, 1)
            assert isinstance(after, cairn.ToolUnavailable)
            assert "its session is over" in str(after)

    asyncio.run(run())


def test_episodes_wait_for_a_free_session(url: str) -> None:
    async def run() -> None:
        async with cairn.openenv(url) as first, cairn.openenv(url) as second:
            await answer(first.reset)
            await answer(second.reset)
            async with cairn.openenv(url, patience=0.1) as hasty:
                refused = await answer(hasty.reset)
                assert isinstance(refused, cairn.ToolUnavailable)
                assert "no free session within 0.1 s" in str(refused)
            async with cairn.openenv(url) as patient:
                waiting = asyncio.create_task(answer(patient.reset, seed=1))
                await asyncio.sleep(0)
                await first.__aexit__()
                assert (await waiting)["done"] is False

    asyncio.run(run())


def test_a_late_answer_ends_the_session_and_a_dead_server_is_named() -> None:
    """The last one: it leaves the server dead."""

    async def run(url: str) -> None:
        async with cairn.openenv(url, timeout=1) as env:
            await answer(env.reset, seed=7)
            late = await act(env, -2)
            assert isinstance(late, cairn.ToolFailed)
            assert str(late) == "step: it took longer than 1 s"
            assert "a step was not answered in time" in str(await act(env, 1))
        async with cairn.openenv(url) as env:
            await answer(env.reset, seed=7)
            lost = await act(env, -4)
            assert isinstance(lost, cairn.ToolLost)
            assert "closed the connection" in str(lost)
        async with cairn.openenv(url) as env:
            gone = await answer(env.reset)
            assert isinstance(gone, cairn.ToolUnavailable)
            assert f"the environment at {url}: it cannot be reached" in str(gone)

    port = free_port()
    with serving([str(PYTHON), str(HERE / "openenv_server.py"), str(port), "2"], port):
        asyncio.run(run(f"http://127.0.0.1:{port}"))


def test_an_environment_is_not_pure() -> None:
    with pytest.raises(ValueError, match="set kind to deterministic or effects"):
        cairn.openenv("http://127.0.0.1:9", kind="pure")
