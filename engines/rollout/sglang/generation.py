"""Generation through SGLang's HTTP interface: one `/generate` a sample, as many at once as the servers shall have.

| what `/generate` answers | what becomes of it |
|---|---|
| 400, 413, 422: the request is at fault | RequestRefused for that one, once all others are done; not asked again |
| no connection, or 5xx | behind a router asked again, `ATTEMPTS` times in all, of another server; else an error |
| anything else but 200 | EngineError at once |

An abort goes to every server that may have a request, by the request's own id: the server drops ids that it does not
hold (`TokenizerManager.abort_request`), so a prefix of many ids would not reach its scheduler. That one in turn aborts
whatever begins with the id, so no id may be the beginning of another.
"""

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cairn.engines.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed, RequestRefused
from cairn.engines.rollout.sglang.completions import completion
from cairn.engines.rollout.sglang.loads import Loads
from cairn.engines.rollout.sglang.route import Route
from cairn.engines.types import Completion, FinishReason, GenerateRequest, RequestId

ATTEMPTS = 3
"""Times that a sample is asked for behind a router."""
ABORT_TIMEOUT = 30.0
"""Seconds within which an aborted generation must have given everything back."""
_ABORT_AGAIN = 0.5
_CONNECT_TIMEOUT = 10.0
_AT_FAULT = (400, 413, 422)
_OUT_OF_REACH = (502, 503, 504)

Finished = queue.SimpleQueue[Completion | Exception | None]
"""Completions as they come, an error that ends them, and None at the end."""


class _ServerFailed(Exception):
    """Another server may do what this one did not."""

    def __init__(self, error: EngineError) -> None:
        self.error = error


class Generation:
    """One call of `generate`, in a thread with an event loop of its own.

    Args:
        route: to the servers.
        context: most tokens of a prompt and its response.
        timeout: seconds that all of it may take.
        concurrency: samples asked for at a time.
        aborted: ends the generation when set: samples then come as far as they are.
        loads: watches a server meanwhile.
    """

    def __init__(
        self,
        route: Route,
        context: int,
        timeout: float,
        concurrency: int,
        aborted: threading.Event,
        loads: Loads,
    ) -> None:
        self._route = route
        self._context = context
        self._timeout = timeout
        self._aborted = aborted
        self._loads = loads
        self._slots = asyncio.Semaphore(concurrency)
        self._attempts = ATTEMPTS if route.servers != (route.url,) else 1
        self._name = uuid.uuid4().hex
        self._running: set[str] = set()
        """Ids of the requests that a server may be at work on."""
        self._refused: dict[RequestId, str] = {}

    def run(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Yield each sample as it finishes. Raises EngineDied, EngineTimeout, EngineError, and RequestRefused when the
        other requests are done."""
        finished: Finished = queue.SimpleQueue()
        worker = threading.Thread(target=self._run, args=(requests, finished), daemon=True, name="sglang-client")
        worker.start()
        try:
            while (item := finished.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield [item]
        finally:
            self._aborted.set()
            worker.join()

    def _run(self, requests: Sequence[GenerateRequest], finished: Finished) -> None:
        try:
            asyncio.run(self._generate_all(requests, finished))
        # Whatever it is belongs to the thread that waits for the completions.
        except ExceptionGroup as failed:
            finished.put(failed.exceptions[0])
        except Exception as error:
            finished.put(error)
        finally:
            finished.put(None)

    async def _generate_all(self, requests: Sequence[GenerateRequest], finished: Finished) -> None:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
            try:
                async with asyncio.timeout(self._timeout), asyncio.TaskGroup() as group:  # one failure ends all
                    watches = [
                        group.create_task(self._abort_when_told(http)),
                        group.create_task(self._loads.watch(http)),
                    ]
                    calls = [
                        group.create_task(self._sample(http, number, request))
                        for number, request in enumerate(requests)
                    ]
                    for call in asyncio.as_completed(calls):
                        sample = await call
                        if sample is not None:
                            finished.put(sample)
                    for watch in watches:
                        watch.cancel()
            except TimeoutError:
                raise EngineTimeout(f"generation did not end within {self._timeout:g} s") from None
            finally:
                await self._abort_running(http)
        if self._refused:
            raise RequestRefused(self._refused)

    async def _sample(self, http: aiohttp.ClientSession, number: int, request: GenerateRequest) -> Completion | None:
        """One sample, the call's `number`th; None where it was refused."""
        async with self._slots:
            began = time.perf_counter()
            retrying = AsyncRetrying(
                retry=retry_if_exception_type(_ServerFailed),
                stop=stop_after_attempt(self._attempts),
                wait=wait_random_exponential(multiplier=0.1, max=2.0),
                reraise=True,
            )
            try:
                async for attempt in retrying:
                    with attempt:
                        if self._aborted.is_set():
                            return Completion.empty(request.request_id, FinishReason.ABORT)
                        rid = f"{self._name}-{number:08d}-{attempt.retry_state.attempt_number}"
                        content = await self._ask(http, rid, request)
            except _ServerFailed as failed:
                raise failed.error from failed
            except RequestRefused as refused:
                self._refused |= refused.refused
                return None
            params = request.sampling_params
            return completion(
                request.request_id,
                content,
                time.perf_counter() - began,
                may_abort=self._aborted.is_set(),
                with_kept=params.cuts_vocabulary and params.return_kept,
            )

    async def _ask(self, http: aiohttp.ClientSession, rid: str, request: GenerateRequest) -> dict[str, Any]:
        """The server's reply to one `/generate`. Raises _ServerFailed, RequestRefused and EngineError.

        A 500 of a router may only mean that a server is gone, so the request is at fault where all of them answer."""
        params, given = request.sampling_params, len(request.input_ids)
        body = {
            "rid": rid,
            "input_ids": [*map(int, request.input_ids)],
            "sampling_params": {
                "max_new_tokens": min(params.max_new_tokens - request.position, self._context - given),
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
                "sampling_seed": request.seed % 2**31,
            },
            "return_logprob": True,
            "return_sampling_mask": params.cuts_vocabulary and params.return_kept,
        }
        url, headers = f"{self._route.url}/generate", self._route.headers(request.request_id)
        self._running.add(rid)
        try:
            async with http.post(url, json=body, headers=headers) as reply:
                content = await reply.json() if reply.status == 200 else await reply.text()
        except aiohttp.ClientError as error:
            raise _ServerFailed(EngineDied(f"/generate of {self._route.url}: {error}")) from error
        self._running.discard(rid)
        if isinstance(content, dict):
            return content
        if reply.status in _AT_FAULT:
            raise RequestRefused({request.request_id: f"/generate refused it ({reply.status}): {content[:500]}"})
        told = f"/generate of {self._route.url} failed ({reply.status}): {content[:500]}"
        if reply.status < 500:
            raise EngineError(told)
        at_fault = reply.status not in _OUT_OF_REACH and await self._all_answer(http)
        raise _ServerFailed(GenerationFailed(told) if at_fault else EngineError(told))

    async def _all_answer(self, http: aiohttp.ClientSession) -> bool:
        try:
            for server in self._route.servers:
                async with http.get(f"{server}/health", timeout=aiohttp.ClientTimeout(_CONNECT_TIMEOUT)) as reply:
                    if reply.status != 200:
                        return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def _abort_when_told(self, http: aiohttp.ClientSession) -> None:
        """Wait for the abort; then tell the servers until everything has come back."""
        while not self._aborted.is_set():
            await asyncio.sleep(0.05)
        deadline = time.monotonic() + ABORT_TIMEOUT
        while time.monotonic() < deadline:
            await self._abort_running(http)
            await asyncio.sleep(_ABORT_AGAIN)  # a request that was still on its way is not known yet
        raise EngineTimeout(f"{len(self._running)} samples were not given back {ABORT_TIMEOUT:g} s after the abort")

    async def _abort_running(self, http: aiohttp.ClientSession) -> None:
        """Tell every server to end what it may still have of this call."""
        await asyncio.gather(*(self._abort_at(http, server, list(self._running)) for server in self._route.servers))

    async def _abort_at(self, http: aiohttp.ClientSession, server: str, rids: Sequence[str]) -> None:
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT)
        # A server that does not answer has nothing to give back; what was asked of it fails by itself.
        with suppress(aiohttp.ClientError, TimeoutError):
            for rid in rids:
                if rid in self._running:
                    async with http.post(f"{server}/abort_request", json={"rid": rid}, timeout=timeout):
                        pass
