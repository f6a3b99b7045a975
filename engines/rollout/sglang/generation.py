"""Generation through SGLang's HTTP interface: one `/generate` for each sample, with a bounded number at once.

| response of `/generate` | consequence |
|---|---|
| 400, 413, 422: the request is at fault | RequestRefused for that one; no retry |
| no connection, or 5xx | behind a router, `ATTEMPTS` attempts in all, on other servers; without one, an error |
| anything else but 200 | EngineError at once |

Retracted samples are aborted at the servers and return with what they have. They are requested again from there when
generation resumes. Callers that wait for them notice nothing. A server can also retract by itself
(`/pause_generation`), and computes the same. But then a sample's tokens are unknown until it ends, and a driver that is
killed loses them.

An abort goes to every server that may have a request, by the request's own id. The server drops ids that it does not
have (`TokenizerManager.abort_request`), so a prefix of many ids would not reach its scheduler. The scheduler aborts all
requests whose ids begin with the given id, so no id may be a prefix of another.
"""

import asyncio
import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from cairn.engines.rollout.admission import Occupancy
from cairn.engines.rollout.sglang.completions import Routes, completion
from cairn.engines.rollout.sglang.server import LOADS
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed, RequestRefused
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId

# Load of a server while it generates.


_INTERVAL = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=5)


class Loads:
    """The most requests that a server ran, and had waiting, at any of the moments at which it was polled."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.running = 0
        self.queued = 0

    async def watch(self, http: aiohttp.ClientSession) -> None:
        """Poll the server until cancelled. A server that does not respond is not judged here."""
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{self._server}{LOADS}", timeout=_TIMEOUT) as reply:
                    ranks = (await reply.json())["loads"] if reply.status == 200 else []
                self.running = max(self.running, sum(rank["num_running_reqs"] for rank in ranks))
                self.queued = max(self.queued, sum(rank["num_waiting_reqs"] for rank in ranks))
            await asyncio.sleep(_INTERVAL)


# Route of an engine's requests: to its own server, or through a router to any server of the fleet.


ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which the router's policies `consistent_hashing` and `manual` keep requests together."""


@dataclass(frozen=True)
class Route:
    """Destination of `/generate`, and every server that it may reach."""

    url: str
    """Address for `/generate`."""
    servers: tuple[str, ...]
    """Addresses for everything else, such as `/abort_request`: the router passes on generation alone."""

    @classmethod
    def to(cls, server: str) -> "Route":
        """Return the route straight to one server."""
        return cls(server, (server,))

    def headers(self, request_id: RequestId) -> Mapping[str, str]:
        """Return the headers of a `/generate`: the samples of a group share a prompt, and so a cache."""
        return {ROUTING_KEY: str(request_id[0])}


ATTEMPTS = 3
"""Attempts at a sample behind a router."""
ABORT_TIMEOUT = 30.0
"""Seconds within which an aborted generation must have returned everything."""
_ABORT_INTERVAL = 0.5
_SOON = 0.002
_CONNECT_TIMEOUT = 10.0
_AT_FAULT = (400, 413, 422)
_OUT_OF_REACH = (502, 503, 504)


class _ServerFailed(Exception):
    """A failure of one server, where another server may succeed."""

    def __init__(self, error: EngineError) -> None:
        self.error = error


class Generation:
    """The requests of one stream, of a server or of several behind a router. After the first request it has a thread
    and an event loop of its own.

    Args:
        route: route to the servers.
        context: most tokens of an input and its response.
        timeout: seconds that a sample may take, from its request or its last retraction.
        concurrency: samples requested at a time.
        loads: polls a server meanwhile.
        occupancy: occupancy of the engine.
        explained: returns the error to raise for a server that died.
        routes: reads the experts of tokens from replies.
    """

    _over: asyncio.Event
    _http: aiohttp.ClientSession

    def __init__(
        self,
        route: Route,
        context: int,
        timeout: float,
        concurrency: int,
        loads: Loads,
        occupancy: Occupancy,
        explained: Callable[[EngineDied], EngineDied] = lambda error: error,
        routes: Routes | None = None,
    ) -> None:
        self._route = route
        self._context = context
        self._timeout = timeout
        self._loads = loads
        self._occupancy = occupancy
        self._explained = explained
        self._routes = routes
        self._slots = asyncio.Semaphore(concurrency)
        self._may_request = asyncio.Event()
        self._may_request.set()
        self._parts: dict[RequestId, Completion] = {}
        """Parts of unfinished samples, as of their last retraction."""
        self._attempts = ATTEMPTS if route.servers != (route.url,) else 1
        self._name = uuid.uuid4().hex
        self._number = itertools.count()
        self._running: set[str] = set()
        """Ids of the requests that a server may be running."""
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks, one for each unfinished sample."""
        self._late: str | None = None
        """Error message for samples that no server returns."""
        self._aborted = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: Future[asyncio.AbstractEventLoop] = Future()

    def submit(self, requests: Sequence[GenerateRequest]) -> list["Future[Completion]"]:
        """Request a sample for each. A future ends with its completion or with an error, in the thread."""
        pending = [(request, Future[Completion]()) for request in requests]
        self._occupancy.enter(len(pending))
        with self._lock:
            aborted = self._aborted
            if pending and not aborted:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, daemon=True, name="sglang-client")
                    self._thread.start()
                self._call(self._begin, pending)
        if aborted:
            self._occupancy.leave(len(pending))
            for request, future in pending:
                future.set_result(Completion.empty(request.request_id, FinishReason.ABORT))
        return [future for _, future in pending]

    def pause(self) -> None:
        """Retract all samples, and send servers no requests until `resume`. Returns when no server runs any of them.
        Raises EngineTimeout."""
        with self._lock:
            if self._aborted:
                return  # nothing will resume
            if self._thread is None:
                self._may_request.clear()
                return
            try:
                pausing = asyncio.run_coroutine_threadsafe(self._pause(), self._loop.result())
            except RuntimeError:  # its loop is closed
                return
        with suppress(CancelledError):  # it ended meanwhile
            pausing.result()

    def resume(self) -> None:
        """Request what is left of the paused samples."""
        with self._lock:
            if self._thread is None:
                self._may_request.set()
            self._call(self._may_request.set)

    def retracted(self) -> list[Completion]:
        """Return the parts of retracted samples; see `cairn.engines.rollout.base.RolloutEngine.retracted`."""
        return [part for part in list(self._parts.values()) if len(part.response_ids)]

    def abort(self) -> None:
        """Abort all requests; see `Stream.abort`."""
        with self._lock:
            if not self._aborted:
                self._aborted = True
                self._call(self._begin_to_abort)

    def close(self) -> None:
        """Cancel what has not ended, with its futures. Servers are notified, but this does not wait until they have
        ended it."""
        with self._lock:
            self._aborted = True
            self._call(lambda: self._over.set())
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _call(self, call: Callable[..., object], *args: object) -> None:
        """Make a call in the thread, if the thread still runs."""
        if self._thread is not None:
            with suppress(RuntimeError):  # its loop is closed
                self._loop.result().call_soon_threadsafe(call, *args)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            if self._loop.done():
                raise
            self._loop.set_exception(error)

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            watch = asyncio.create_task(self._loads.watch(self._http))
            self._loop.set_result(asyncio.get_running_loop())
            await self._over.wait()
            watch.cancel()
            left = set(self._tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(self._abort_running(), *left, return_exceptions=True)

    def _begin(self, pending: Sequence[tuple[GenerateRequest, "Future[Completion]"]]) -> None:
        for request, future in pending:
            task = asyncio.create_task(self._answer(request, future))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, request: GenerateRequest, future: "Future[Completion]") -> None:
        """Complete the sample's future."""
        result: Completion | Exception | None = None
        try:
            async with asyncio.timeout(self._timeout) as limit:
                result = await self._sample(request, limit)
        except TimeoutError:
            result = EngineTimeout(f"generation did not end within {self._timeout:g} s")
        except EngineDied as error:
            result = self._explained(error)
        except Exception as error:  # the caller that waits for the sample receives it
            result = error
        finally:
            self._parts.pop(request.request_id, None)
            self._occupancy.leave(1)
            if result is None and self._late is not None:
                result = EngineTimeout(self._late)
            if result is None:
                future.cancel()
            elif isinstance(result, Completion):
                future.set_result(result)
            else:
                future.set_exception(result)

    async def _sample(self, request: GenerateRequest, limit: asyncio.Timeout) -> Completion:
        """Return the sample's completion. After each retraction, its rest is requested again."""
        part: Completion | None = None
        async with self._slots:
            while True:
                rest = await self._rest_of(request.after(part))
                part = rest if part is None else part.then(rest)
                if rest.finish_reason != FinishReason.ABORT or self._aborted:
                    return part
                whole = min(request.sampling_params.max_new_tokens - request.position, self._room(request))
                if len(part.response_ids) >= whole:  # the abort came after its last token
                    return replace(part, finish_reason=FinishReason.LENGTH)
                self._parts[request.request_id] = part
                limit.reschedule(asyncio.get_running_loop().time() + self._timeout)

    def _room(self, request: GenerateRequest) -> int:
        return self._context - len(request.input_ids)

    async def _rest_of(self, request: GenerateRequest) -> Completion:
        """Return what servers generate for a request, until it ends or is aborted."""
        number = next(self._number)
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
                    await self._may_request.wait()
                    if self._aborted:
                        return Completion.empty(request.request_id, FinishReason.ABORT)
                    rid = f"{self._name}-{number:08d}-{attempt.retry_state.attempt_number}"
                    content = await self._ask(rid, request)
        except _ServerFailed as failed:
            raise failed.error from failed
        params, input_length = request.sampling_params, len(request.input_ids)
        routes = self._routes if params.return_routed_experts else None
        return completion(
            request.request_id,
            content,
            time.perf_counter() - began,
            may_abort=self._aborted or not self._may_request.is_set(),
            stop=params.stop,
            with_support=params.cuts_vocabulary and params.return_sampling_support,
            routes=None if routes is None else lambda meta, length: routes.read(meta, input_length + length - 1),
        )

    async def _ask(self, rid: str, request: GenerateRequest) -> dict[str, Any]:
        """Return the server's reply to one `/generate`. Raises _ServerFailed, RequestRefused and EngineError.

        A 500 of a router may only mean that a server is gone. So the request is at fault only where all servers
        respond.
        """
        params = request.sampling_params
        # A resumed sample prefills all that it has. None of its decoded tokens are taken from the cache, because those
        # of a lost attempt would not be there. Requests that resume at the same position share what was prefilled
        # (`extra_key`).
        #
        # A server matches stop strings in the text of all tokens, special ones too, and trims no token.
        stop = {"stop": list(params.stop), "no_stop_trim": True, "skip_special_tokens": False} if params.stop else {}
        body = {
            "rid": rid,
            "input_ids": [*map(int, request.input_ids)],
            "sampling_params": {
                "max_new_tokens": min(params.max_new_tokens - request.position, self._room(request)),
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": list(params.stop_token_ids),
                "sampling_seed": request.seed % 2**31,
                **stop,
            },
            **({"extra_key": f"from {request.position}"} if request.position else {}),
            "return_logprob": True,
            "return_sampling_mask": params.cuts_vocabulary and params.return_sampling_support,
            **({"return_routed_experts": True} if params.return_routed_experts else {}),
        }
        url, headers = f"{self._route.url}/generate", self._route.headers(request.request_id)
        self._running.add(rid)
        try:
            async with self._http.post(url, json=body, headers=headers) as reply:
                content = await reply.json() if reply.status == 200 else await reply.text()
        except aiohttp.ClientError as error:
            raise _ServerFailed(EngineDied(f"/generate of {self._route.url}: {error}")) from error
        self._running.discard(rid)
        if isinstance(content, dict):
            return content
        if reply.status in _AT_FAULT:
            raise RequestRefused({request.request_id: f"/generate refused it ({reply.status}): {content[:500]}"})
        message = f"/generate of {self._route.url} failed ({reply.status}): {content[:500]}"
        if reply.status < 500:
            raise EngineError(message)
        at_fault = reply.status not in _OUT_OF_REACH and await self._all_answer()
        raise _ServerFailed(GenerationFailed(message) if at_fault else EngineError(message))

    async def _all_answer(self) -> bool:
        try:
            for server in self._route.servers:
                async with self._http.get(f"{server}/health", timeout=aiohttp.ClientTimeout(_CONNECT_TIMEOUT)) as reply:
                    if reply.status != 200:
                        return False
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def _pause(self) -> None:
        self._may_request.clear()
        deadline = time.monotonic() + ABORT_TIMEOUT
        next_abort = 0.0
        while self._running:
            if time.monotonic() > deadline:
                raise EngineTimeout(f"{len(self._running)} samples were not retracted within {ABORT_TIMEOUT:g} s")
            if time.monotonic() > next_abort:  # some may only have been on their way
                await self._abort_running()
                next_abort = time.monotonic() + _ABORT_INTERVAL
            await asyncio.sleep(_SOON)

    def _begin_to_abort(self) -> None:
        self._may_request.set()  # paused samples return as they are
        self._aborting = asyncio.create_task(self._abort_until_returned())

    async def _abort_until_returned(self) -> None:
        """Abort at the servers until all samples have returned. Nothing more is requested here."""
        deadline = time.monotonic() + ABORT_TIMEOUT
        while self._tasks and time.monotonic() < deadline:
            await self._abort_running()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=_ABORT_INTERVAL)  # some may only have been on their way
        if self._tasks:
            self._late = f"{len(self._tasks)} samples were not returned {ABORT_TIMEOUT:g} s after the abort"
        self._over.set()

    async def _abort_running(self) -> None:
        """Abort, at every server, what it may still have of this stream."""
        await asyncio.gather(*(self._abort_at(server, list(self._running)) for server in self._route.servers))

    async def _abort_at(self, server: str, rids: Sequence[str]) -> None:
        timeout = aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT)
        # A server that does not respond has nothing to return, and its requests fail by themselves.
        with suppress(aiohttp.ClientError, TimeoutError):
            for rid in rids:
                if rid in self._running:
                    async with self._http.post(f"{server}/abort_request", json={"rid": rid}, timeout=timeout):
                        pass
