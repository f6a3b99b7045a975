"""How samples are asked of real servers: aborts, continuations, refusals, deadlines, another server's turn."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, PreTrainedModel

from cairn.engines.rollout.admission import Occupancy
from cairn.engines.rollout.sglang.engine import ServerStream, SGLangEngine
from cairn.engines.rollout.sglang.generation import ATTEMPTS, Generation, Loads, Route
from cairn.engines.rollout.sglang.router import Router
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed, RequestRefused
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams
from tests.requests import by_id, group, ids
from tests.sglang_server import once_decoding, running
from tests.waiting import wait_for

CONTEXT = 1024

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


def requests(count: int, samples: int = 4, **params: object) -> list[GenerateRequest]:
    given = SamplingParams(**{"max_new_tokens": 8, **params})  # type: ignore[arg-type]
    return [one for index in range(count) for one in group(index, [5 + index, 6, 7, 8], range(samples), given)]


def generation(route: Route, *, context: int = CONTEXT, timeout: float = 60, concurrency: int = 64) -> Generation:
    return Generation(route, context, timeout, concurrency, Loads(route.servers[0]), Occupancy())


def run(stream: Generation, requested: Sequence[GenerateRequest]) -> dict[RequestId, Completion]:
    return by_id(streamed(stream, requested))


def streamed(generation: Generation, requested: Sequence[GenerateRequest]) -> ServerStream:
    stream = ServerStream(generation)
    stream.submit(requested)
    return stream


def log_probs(model: PreTrainedModel, prompt: list[int], response: np.ndarray, temperature: float) -> np.ndarray:
    """[T] by Hugging Face."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *response.tolist()]])).logits[0, len(prompt) - 1 : -1].float()
    actual = torch.log_softmax(logits / temperature, -1)
    return actual.gather(1, torch.tensor(response, dtype=torch.int64)[:, None])[:, 0].numpy()


@pytest.fixture
def route(engine: SGLangEngine) -> Route:
    return Route.to(engine.server.url)


def test_an_aborted_response_is_continued_from_its_old_tokens_under_other_weights(
    engine: SGLangEngine, route: Route, model: PreTrainedModel
) -> None:
    requested = requests(12, max_new_tokens=300, temperature=0.9)
    stream = generation(route, concurrency=24)
    with once_decoding(engine.health, stream.abort):
        first = run(stream, requested)
    assert first.keys() == ids(12, 4)
    parts = {key: sample for key, sample in first.items() if sample.finish_reason == FinishReason.ABORT}
    lengths = sorted(len(sample.response_ids) for sample in parts.values())
    assert lengths[0] == 0, "some waited with the client"
    assert 0 < lengths[-1] < 300, "some were under way"
    wait_until_idle(engine)

    changed = {name: value.detach() * 1.1 for name, value in model.named_parameters()}
    engine.begin_weight_update(1)
    engine.update_weights(changed)
    engine.end_weight_update()
    repeated = [
        replace(one, input_ids=[*one.input_ids, *part.response_ids.tolist()], position=len(part.response_ids))
        for one in requested
        if (part := parts.get(one.request_id)) is not None
    ]
    second = run(generation(route), repeated)
    sampled_with = AutoModelForCausalLM.from_config(model.config).eval()
    sampled_with.load_state_dict(changed, strict=False)
    sampled_with.tie_weights()
    for request in repeated:
        sample, drawn = second[request.request_id], request.position
        assert drawn + len(sample.response_ids) <= 300
        assert sample.finish_reason == FinishReason.STOP or drawn + len(sample.response_ids) == 300
        prompt = list(request.input_ids[: len(request.input_ids) - drawn])
        whole = np.concatenate([first[request.request_id].response_ids, sample.response_ids])
        for made, by, part, version in (
            (first[request.request_id], model, slice(None, drawn), 0),
            (sample, sampled_with, slice(drawn, None), 1),
        ):
            expected = log_probs(by, prompt, whole, 0.9)[part]
            assert np.abs(made.log_probs - expected).max(initial=0) < 1e-4
            assert (made.weight_versions == version).all()


def test_behind_a_router_too_a_response_that_goes_on_is_read_as_a_whole(
    engine: SGLangEngine, route: Route, tmp_path: Path
) -> None:
    router = Router({}, "127.0.0.1", tmp_path / "router.log", 60)
    try:
        router.serve([asdict(engine.worker)])
        behind = Route(router.url, route.servers)
        requested = requests(1, samples=1, max_new_tokens=64, temperature=0)
        (first,) = run(generation(behind), requested).values()
        drawn = first.response_ids.tolist()[:-1]
        (whole,) = run(
            generation(behind), [replace(requested[0], input_ids=[*requested[0].input_ids, *drawn])]
        ).values()
        repeated = replace(requested[0], input_ids=[*requested[0].input_ids, *drawn], position=len(drawn))
        (rest,) = run(generation(behind), [repeated]).values()
    finally:
        router.close()
    assert whole.cached_tokens > len(requested[0].input_ids), "the witness that the server has them"
    assert rest.cached_tokens == 0


def test_an_abort_does_not_touch_what_others_asked_of_the_server(engine: SGLangEngine, route: Route) -> None:
    mine = generation(route)
    with ThreadPoolExecutor(2) as pool:
        asked_by_others = pool.submit(lambda: run(generation(route), requests(4, max_new_tokens=400)))
        asked_by_me = pool.submit(lambda: run(mine, requests(4, max_new_tokens=900)))
        wait_for(lambda: running(engine.health()) >= 20, 60)  # some of either, of 16 and 16
        mine.abort()
        aborted, others = asked_by_me.result(), asked_by_others.result()
    assert FinishReason.ABORT in {sample.finish_reason for sample in aborted.values()}
    assert len(others) == 16
    assert {sample.finish_reason for sample in others.values()} <= {FinishReason.STOP, FinishReason.LENGTH}


def test_an_abort_reaches_the_servers_behind_a_router(engine: SGLangEngine, route: Route, tmp_path: Path) -> None:
    router = Router({}, "127.0.0.1", tmp_path / "router.log", 60)
    try:
        router.serve([asdict(engine.worker)])
        stream = generation(Route(router.url, route.servers))
        with once_decoding(engine.health, stream.abort):
            done = run(stream, requests(4, max_new_tokens=900))
    finally:
        router.close()
    assert done.keys() == ids(4, 4)
    parts = [sample for sample in done.values() if sample.finish_reason == FinishReason.ABORT]
    assert max(len(sample.response_ids) for sample in parts) > 0
    wait_until_idle(engine)


def test_a_router_that_hangs_is_given_up_and_so_is_what_it_was_asked(
    engine: SGLangEngine, route: Route, tmp_path: Path
) -> None:
    router = Router({}, "127.0.0.1", tmp_path / "router.log", 60, interval=0.1, silence=2.0)
    try:
        router.serve([asdict(engine.worker)])
        assert router.process.pid is not None
        os.kill(router.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDied, match="/generate of"):
            run(generation(Route(router.url, route.servers)), requests(1))
        with pytest.raises(EngineDied, match=f"the router at {router.url} did not answer for 2 s and was given up"):
            router.health()
    finally:
        router.close()


def test_no_more_samples_are_asked_at_a_time_than_allowed(engine: SGLangEngine, route: Route) -> None:
    most = 0
    while not most:  # on a busy machine samples may end between two looks
        for _ in streamed(generation(route, concurrency=3), requests(3, max_new_tokens=100)):
            # A server counts one that has just ended until its next step, when another may have come already.
            most = max(most, min(running(engine.health()) for _ in range(3)))
    assert most <= 3


def test_a_request_that_the_server_refuses_is_named_and_the_others_come(route: Route) -> None:
    requested = group(7, [5] * 5000, (1, 2), SamplingParams(4))  # more than the server's context
    stream = streamed(generation(route, context=9000), requested + requests(2))
    done, refused = list[Completion](), dict[RequestId, str]()
    for _ in range(2):
        with pytest.raises(RequestRefused) as reported:
            done.extend(sample for part in stream for sample in part)
        refused |= reported.value.refused
    done.extend(sample for part in stream for sample in part)
    assert refused.keys() == {(7, 0), (7, 1)}
    assert "400" in refused[7, 0]
    assert {c.request_id for c in done} == ids(2, 4)


def test_a_prompt_that_was_seen_before_comes_from_the_cache(route: Route) -> None:
    prompt = list(range(40, 104))
    requested = group(0, prompt, [1], SamplingParams(2))
    run(generation(route), requested)
    (sample,) = run(generation(route), requested).values()
    assert 32 <= sample.cached_tokens < len(prompt)


def test_what_does_not_end_in_time_is_an_error_and_leaves_the_server_idle(engine: SGLangEngine, route: Route) -> None:
    with pytest.raises(EngineTimeout, match="did not end within 1 s"):
        run(generation(route, timeout=1), requests(8, max_new_tokens=900))
    wait_until_idle(engine)


def test_a_sample_that_meets_new_weights_has_its_time_anew(engine: SGLangEngine, route: Route) -> None:
    requested = generation(route, timeout=3)
    futures = requested.submit(requests(1, samples=16, max_new_tokens=900))
    end = time.monotonic() + 4
    while time.monotonic() < end:
        wait_for(lambda: running(engine.health()) or all(future.done() for future in futures))
        requested.pause()
        time.sleep(0.9)  # a rest counts, so that no server is so fast that samples end before their time
        requested.resume()
    assert not all(future.done() for future in futures)
    requested.abort()
    for future in futures:
        future.result(60)
    requested.close()
    wait_until_idle(engine)


def test_giving_up_the_stream_leaves_the_server_idle(engine: SGLangEngine, route: Route) -> None:
    short = requests(1, samples=1)
    long = [replace(one, request_id=(9, *one.request_id)) for one in requests(1, max_new_tokens=900)]
    stream = streamed(generation(route), short + long)
    next(stream)
    stream.close()
    wait_until_idle(engine)


def test_requests_are_added_to_a_stream_while_it_generates_and_a_refused_one_fails_alone(route: Route) -> None:
    stream, (long, *others) = generation(route, context=9000), requests(3, samples=1, max_new_tokens=300)
    (slow,) = stream.submit([long])
    refused, *quick = stream.submit([*group(7, [5] * 5000, [1], SamplingParams(4)), *others])
    with pytest.raises(RequestRefused, match="request 7/0"):
        refused.result(timeout=60)
    assert {future.result(timeout=60).request_id for future in [slow, *quick]} == ids(3, 1)
    stream.close()
    (late,) = stream.submit(others[:1])
    assert late.result(timeout=1).finish_reason == FinishReason.ABORT


def wait_until_idle(engine: SGLangEngine) -> None:
    wait_for(lambda: running(engine.health()) == 0, 30)


@contextmanager
def relay(server: str, answers: list[int | None]) -> Iterator[tuple[str, list[str]]]:
    """What stands where a router does: passes `/generate` on, but for the first ones, which get a status of its own or,
    for None, a closed connection. Yields its address and the ids that it saw."""
    seen: list[str] = []
    ready, stop = threading.Event(), threading.Event()
    address: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append(body["rid"])
        status = answers[len(seen) - 1] if len(seen) <= len(answers) else 200
        if status is None:
            assert request.transport is not None
            request.transport.abort()
            raise web.HTTPServiceUnavailable
        if status != 200:
            return web.Response(status=status, text="no server")
        async with aiohttp.ClientSession() as http, http.post(f"{server}/generate", json=body) as reply:
            return web.Response(status=reply.status, body=await reply.read(), content_type="application/json")

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        address.append(f"http://{host}:{port}")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.05)
        await runner.cleanup()

    worker = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    worker.start()
    try:
        assert ready.wait(60)
        yield address[0], seen
    finally:
        stop.set()
        worker.join()


@pytest.mark.parametrize("failure", [503, None])
def test_behind_a_router_another_server_gets_its_turn(route: Route, failure: int | None) -> None:
    with relay(route.url, [failure, failure]) as (url, seen):
        done = run(generation(Route(url, route.servers)), requests(1, samples=1))
    assert done.keys() == {(0, 0)}
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.parametrize(("failure", "error"), [(503, EngineError), (None, EngineDied)])
def test_a_failure_is_told_after_a_few_attempts_and_at_once_where_there_is_one_server(
    route: Route, failure: int | None, error: type[EngineError]
) -> None:
    with relay(route.url, [failure] * 9) as (url, seen), pytest.raises(error):
        run(generation(Route(url, route.servers)), requests(1, samples=1))
    assert len(seen) == ATTEMPTS
    with relay(route.url, [failure] * 9) as (url, seen), pytest.raises(error):
        run(generation(Route.to(url)), requests(1, samples=1))
    assert len(seen) == 1


def test_a_prompt_is_at_fault_only_where_every_server_still_answers(route: Route) -> None:
    def failure(status: int, servers: tuple[str, ...]) -> type[Exception]:
        with relay(route.url, [status] * 9) as (url, _), pytest.raises(EngineError) as raised:
            run(generation(Route(url, servers)), requests(1, samples=1))
        return raised.type

    assert failure(500, route.servers) is GenerationFailed
    assert failure(500, (*route.servers, "http://127.0.0.1:9")) is EngineError
    assert failure(503, route.servers) is EngineError


def test_a_refusal_is_not_asked_again(route: Route) -> None:
    with relay(route.url, [400]) as (url, seen), pytest.raises(RequestRefused):
        run(generation(Route(url, route.servers)), requests(1, samples=1))
    assert len(seen) == 1
