"""What becomes of a server that fails, or answers something else than was asked: one that stands in for a real one,
which does neither."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from tenacity import wait_none

from cairn.engines.scoring import client
from cairn.engines.scoring.client import ATTEMPTS, ServedModel
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, TeacherUnusable
from cairn.engines.types.types import TrainBatch

Answer = Callable[[int, dict[str, Any]], Any]
"""(how often it was asked before, what is posted) → JSON, or an HTTP status."""

IDS = [5, 6, 7, 8]
"""Prompt of two tokens and response of two."""
TEXTS = {5: "a", 6: "b", 7: "c", 8: "�"}
BATCH = TrainBatch([np.array(IDS, np.int32)], [2], [np.ones(2, np.uint8)])


@contextmanager
def server(answer: Answer, keys: list[str | None] | None = None) -> Iterator[str]:
    requested = 0

    async def models(request: web.Request) -> web.Response:
        if keys is not None:
            keys.append(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "teacher"}]})

    async def scores(request: web.Request) -> web.Response:
        nonlocal requested
        actual = answer(requested, await request.json())
        requested += 1
        if actual is None:
            await asyncio.sleep(30)
        return web.Response(status=actual, text="busy") if isinstance(actual, int) else web.json_response(actual)

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/completions", scores), web.post("/generate", scores)])
    loop, runner = asyncio.new_event_loop(), web.AppRunner(app, handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port: int = runner.addresses[0][1]
        return port

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{asyncio.run_coroutine_threadsafe(start(), loop).result(10)}"
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "wait_random_exponential", lambda **limits: wait_none())


def ask(url: str, api: str = "openai", timeout: float = 10) -> list[float]:
    model = ServedModel(url, api, "teacher", timeout=timeout, concurrency=2, spell=TEXTS.__getitem__)
    (actual,) = model.log_probs(BATCH)
    return [float(value) for value in actual]


def completion(tokens: list[str], log_probs: list[Any]) -> Any:
    return {"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": log_probs}}]}


GOOD = completion([f"token_id:{token}" for token in (*IDS, 9)], [None, -4.0, -2.0, -1.0, -8.0])


def test_a_server_that_says_token_ids_or_texts_is_understood_and_the_generated_token_passed_over() -> None:
    def as_vllm(requested: int, body: dict[str, Any]) -> Any:
        assert (body["prompt"], body["echo"], body["model"]) == (IDS, True, "teacher")
        return GOOD

    with server(as_vllm) as url:
        assert ask(url) == [-2.0, -1.0]
    of_texts = completion(["a", "b", "c", "Ã"], [None, -4.0, -2.0, -1.0])  # the last is a part of a character
    with server(lambda *_: of_texts) as url:
        assert ask(url) == [-2.0, -1.0]


def test_the_key_of_the_environment_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[str | None] = []
    with server(lambda *_: GOOD, keys) as url:
        ask(url)
        monkeypatch.setenv(client.KEY, "secret")
        ask(url)
    assert keys == [None, "Bearer secret"]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_asked_again_and_what_does_not_pass_is_an_error_that_a_step_is_tried_again_for(
    status: int,
) -> None:
    with server(lambda requested, _: status if requested < ATTEMPTS - 1 else GOOD) as url:
        assert ask(url) == [-2.0, -1.0]
    with (
        server(lambda *_: status) as url,
        pytest.raises(EngineError, match=f"/v1/completions .* responds with {status}: busy"),
    ):
        ask(url)


def test_nobody_there_and_silence_have_names_of_their_own() -> None:
    with server(lambda *_: None) as url, pytest.raises(EngineTimeout, match=r"within 0\.05 s \(model\.teacher_timeout"):
        ask(url, timeout=0.05)
    with pytest.raises(EngineDied, match="/v1/models of"):
        ask(url)


def test_a_teacher_that_is_silent_is_not_waited_for_once_it_is_not_needed() -> None:
    requested = threading.Event()

    def silent(before: int, body: dict[str, Any]) -> None:
        requested.set()

    with server(silent) as url, ThreadPoolExecutor(1) as pool:
        model = ServedModel(url, "openai", "teacher", timeout=600, concurrency=2, spell=TEXTS.__getitem__)
        answer = pool.submit(model.log_probs, BATCH)
        assert requested.wait(30)
        model.abort()
        with pytest.raises(asyncio.CancelledError):
            answer.result(30)
        with pytest.raises(asyncio.CancelledError):  # and from then on
            model.log_probs(BATCH)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (404, "responds with 404: busy"),
        (completion(["token_id:5", "token_id:6", "token_id:3", "token_id:8"], [None, -4, -2, -1]), "for token 3, but"),
        (completion(["a", "b", "d", "e"], [None, -4, -2, -1]), "is for 'd', but 'c' was sent, .* another tokenizer"),
        (completion(["a"], [-1]), "has 1 log-probs for 2 tokens"),
        (completion(["a", "b", "c", "e"], [None, -4, None, -1]), "has None instead of a log-prob, at 0 of 2"),
        (completion(["a", "b", "c", "e"], [None, -4, -2, 0.5]), "has 0.5 instead of a log-prob, at 1 of 2"),
        ({"choices": []}, "has no log-probs of the tokens that were sent"),
    ],
)
def test_an_answer_to_something_else_is_refused_at_once(answer: Any, says: str) -> None:
    requested = []

    def once(before: int, body: dict[str, Any]) -> Any:
        requested.append(before)
        return answer

    with server(once) as url, pytest.raises(TeacherUnusable, match=says):
        ask(url)
    assert requested == [0]


def test_sglang_is_held_to_its_ids_too() -> None:
    def answer(*ids: int) -> Answer:
        entries = [[None, 6, None], *([-1.0, token, None] for token in ids)]
        return lambda requested, body: {
            "meta_info": {"input_token_logprobs": entries[-(4 - body["logprob_start_len"]) :]}
        }

    with server(answer(7, 8)) as url:
        assert ask(url, "sglang") == [-1.0, -1.0]
    with server(answer(7, 9)) as url, pytest.raises(TeacherUnusable, match="for token 9, but token 8 was sent, at 1"):
        ask(url, "sglang")


def test_the_most_probable_tokens_are_as_many_as_were_asked_for() -> None:
    def answer(*top: list[list[Any]]) -> Answer:
        tokens = [[None, 6, None], [-1.0, 7, None], [-2.0, 8, None]]
        reported = {"input_token_logprobs": tokens, "input_top_logprobs": [None, *top]}
        return lambda requested, body: {"meta_info": reported} if body["top_logprobs_num"] == 2 else 404

    def rows(url: str) -> list[list[float]]:
        model = ServedModel(url, "sglang", "teacher", timeout=10, concurrency=2, spell=TEXTS.__getitem__, top_k=2)
        (actual,) = model.log_probs(BATCH)
        assert actual.dtype == np.float32
        return [[float(value) for value in row] for row in actual]

    first, second = [[-0.5, 9, None], [-1.0, 7, None]], [[-0.25, 3, None], [-2.0, 8, None]]
    with server(answer(first, second)) as url:
        assert rows(url) == [[-1.0, -0.5, -1.0, 9, 7], [-2.0, -0.25, -2.0, 3, 8]]
    for wrong in ([first], [first, second[:1]], [first[:1], second[:1]], [first, [[None, 3, None], second[1]]]):
        says = "has no log-probs of"
        with server(answer(*wrong)) as url, pytest.raises(TeacherUnusable, match=says):
            rows(url)
