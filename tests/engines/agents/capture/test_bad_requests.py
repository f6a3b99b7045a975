"""Requests of other shapes than the APIs have: each is told so, and the session goes on."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from cairn.engines.agents.capture.server import capture
from cairn.engines.agents.episodes.context import Context
from cairn.engines.types.trajectories import SampleRequest, Trajectory
from tests.engines.agents.capture.conftest import Run, user

CHAT, MESSAGES, NATIVE = "/v1/chat/completions", "/v1/messages", "/generate"
HELLO = [user("Hello.")]
BAD: list[tuple[str, Any]] = [
    (CHAT, {"messages": HELLO, "tools": 5}),
    (CHAT, {"messages": HELLO, "stream_options": [1]}),
    (CHAT, {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 5, "tool_choice": "auto"}),
    (MESSAGES, {"messages": HELLO, "max_tokens": 5, "tools": 5}),
    (NATIVE, {"input_ids": [10**30]}),
    (NATIVE, {"input_ids": [5], "sampling_params": {"stop_token_ids": 5}}),
    (CHAT, "[" * 100_000),
    (CHAT, "{"),
    (CHAT, "[]"),
]


def test_a_request_of_another_shape_is_told_so_in_words_of_its_api(run: Run) -> None:
    answers: list[tuple[int, Any]] = []

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, aiohttp.ClientSession() as client:
            for place, body in BAD:
                data = body if isinstance(body, str) else json.dumps(body)
                async with client.post(f"{session.url}{place}", data=data) as answer:
                    answers.append((answer.status, await answer.json()))
            async with client.post(f"{session.url}{CHAT}", json={"messages": HELLO}) as answer:
                assert answer.status == 200
        return session.trajectories()[-1:]

    (sample,) = run(generate)
    assert sample.error is None
    for (place, body), (status, reported) in zip(BAD, answers, strict=True):
        assert status == 400, (place, body, reported)
        assert (status, bool(reported["error"]["message"])) == (400, True), (place, body, reported)


def test_half_a_surrogate_pair_is_no_reason_to_fail(run: Run) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, aiohttp.ClientSession() as client:
            for text in ("\ud800", "a \udfff b"):
                answer = await client.post(f"{session.url}{CHAT}", json={"messages": [user(text)]})
                assert answer.status == 200, await answer.text()
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_request_that_is_made_again_after_its_client_had_gone_one_answer_is_trained_on(
    run: Run, stream: bool
) -> None:
    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session:
            url, body = f"{session.url}{CHAT}", {"messages": HELLO, "stream": stream}
            async with aiohttp.ClientSession() as impatient:
                asking = asyncio.create_task(impatient.post(url, json=body))
                while not session._pending:
                    await asyncio.sleep(0)  # at each turn of the loop, since it is answered within a few
                asking.cancel()
            async with aiohttp.ClientSession() as client:
                answer = await client.post(url, json=body)
                assert "Hello to you." in await answer.text()
            assert len(session.exchanges) == 2
        return session.trajectories()

    (sample,) = run(generate)
    assert sample.error is None
    assert len(sample.trajectories) == 1


def test_a_place_that_is_not_served_is_told_without_the_sessions_key(run: Run) -> None:
    reported: dict[str, tuple[int, bool]] = {}
    places = ("", "/", "/v1/files", "/v1/chat", "/a/b/c/d", "?x=1", "//v1/files")

    async def generate(ctx: Context, sample: SampleRequest) -> list[Trajectory]:
        async with capture(ctx, sample) as session, aiohttp.ClientSession() as client:
            for place in places:
                async with client.get(f"{session.url}{place}") as answer:
                    reported[place] = answer.status, session.key in await answer.text()
            await client.post(f"{session.url}{CHAT}", json={"messages": HELLO})
        return session.trajectories()[-1:]

    run(generate)
    assert reported == dict.fromkeys(places, (404, False))
