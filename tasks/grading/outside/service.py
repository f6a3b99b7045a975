"""Call something outside about many samples at a time, so that a sample fails only by its own response.

| result of the call | result for the sample |
|---|---|
| a response with a reward | that is its reward |
| a response without one, such as a judge's reply without a score | it fails, with the error |
| a refusal of this very request | the same |
| a timeout, a lost connection, HTTP status 408, 425, 429 or 5xx | the call is retried, then the sample fails |
| the same, and then a request that succeeded before fails too | neither fails: GraderUnavailable |
| a refusal of any request, such as a wrong key | none fails: GraderFailed |

`retry.grader` sets the number of retries and the waits before them.
"""

import asyncio
import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from cairn.configs.schema.operations import GraderRetries
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.storage.store.canonical import from_json
from cairn.tasks.grading.worker import ErrorCause, cause_of_error
from cairn.tasks.rewards.grader import Graded, TryAgain
from cairn.tasks.rewards.sample import Sample

_TO_END = 10.0
"""Seconds that requests in flight may take to be cancelled."""

OnResponse = Callable[[int, Graded], None]
"""Callback with (position of the sample, its grade), called as soon as a response arrives."""


class Outside(Protocol):
    """Interface to something outside."""

    name: str
    version: str
    """Version, which changes whenever the same request may get another response."""
    at_once: int
    """Number of requests in flight at a time."""

    def question(self, sample: Sample) -> Any:
        """Return the request for a sample, as JSON values: all that the response depends on besides the version.

        Raises ValueError where there is nothing to request for it.
        """

    async def answer(self, question: Any) -> Graded:
        """Return the reward, or the error that this request always ends in.

        Raises TryAgain, GraderFailed, GraderUnavailable, and any other error where this very request is refused.
        """

    async def close(self) -> None:
        """Close connections."""


@dataclass(frozen=True)
class _Tried:
    graded: Graded
    answered: bool
    transient: bool = False


class OutsideGraders:
    """A grader that calls something outside, in an event loop of its own. Thread-safe."""

    by_group = False
    sees_whole_samples = True
    sees_tokens = True
    sees_messages = False

    def __init__(self, outside: Outside, retries: GraderRetries | None = None) -> None:
        self._outside = outside
        self._retries = retries or GraderRetries()
        self._loop = asyncio.new_event_loop()
        self._room = asyncio.Semaphore(outside.at_once)
        self._closed = threading.Event()
        self._answerable: Any = None
        """A request that got a reward."""
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"grader-{outside.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the grader."""
        return self._outside.name

    @property
    def version(self) -> str:
        """Version of the grader: it changes with its code and with how it makes requests."""
        return self._outside.version

    def question(self, sample: Sample) -> Any:
        """Return the request for a sample: see `Outside.question`."""
        return self._outside.question(sample)

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Return name and version of this grader."""
        return self.name, self.version

    def can_grade(self, sample: Sample) -> None:
        """Store the request of a sample that got a reward before: see `Rememberable.can_grade`."""
        if self._answerable is None:
            self._answerable = self._outside.question(sample)

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch: see `Grading.grade`, and the module for what fails a sample."""
        return self.ask(samples)

    def ask(self, samples: Sequence[Sample], answered: OnResponse = lambda position, graded: None) -> list[Graded]:
        """Grade a batch. Raises as `grade`.

        `answered` is called for every response at once, in another thread, but not for a sample that failed without
        one.
        """
        return self._run(self._ask_all(samples, answered))

    def close(self) -> None:
        """Cancel the requests in flight."""
        if self._closed.is_set():
            return
        self._closed.set()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(_TO_END)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_TO_END)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, list[Graded]]) -> list[Graded]:
        if self._closed.is_set():
            work.close()
            raise GraderFailed(f"the grader {self.name} is closed")
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (CancelledError, asyncio.CancelledError):
            raise GraderFailed(f"the grader {self.name} was closed") from None

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._outside.close()

    async def _ask_all(self, samples: Sequence[Sample], answered: OnResponse) -> list[Graded]:
        async def one(position: int) -> _Tried:
            try:
                question = self._outside.question(samples[position])
            except ValueError as error:
                return _Tried(Graded(None, error=str(error)), answered=False)
            tried = await self._ask(question)
            if tried.answered:
                answered(position, tried.graded)
            if tried.graded.reward is not None:
                self._answerable = question
            return tried

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(position)) for position in range(len(samples))]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        tried = [task.result() for task in tasks]
        left = [one for one in tried if one.transient]
        if left and not await self._answers():
            raise GraderUnavailable(
                f"grader {self.name} could not grade {len(left)} of {len(tried)} samples in {left[0].graded.tries} "
                f"tries, and now fails on samples that it graded before: {left[0].graded.error}"
            )
        return [one.graded for one in tried]

    async def _ask(self, question: Any) -> _Tried:
        tries, waited = 0, 0.0
        delays = iter(self._retries.delays())
        while True:
            tries += 1
            try:
                async with self._room:
                    graded = await self._outside.answer(question)
                return _Tried(replace(graded, tries=tries, waited=waited), answered=True)
            except GraderFailed:
                raise
            except Exception as error:
                message = str(error) if isinstance(error, TryAgain | ValueError) else f"{type(error).__name__}: {error}"
                match cause_of_error(error, self._retries.errors, limited=False):
                    case ErrorCause.MACHINE:
                        raise GraderUnavailable(f"grader {self.name}: {message}") from error
                    case ErrorCause.SERVICE:
                        delay = next(delays, None)
                    case _:
                        return _Tried(Graded(None, error=message, tries=tries, waited=waited), answered=False)
                if delay is None:
                    return _Tried(
                        Graded(None, error=message, tries=tries, waited=waited), answered=False, transient=True
                    )
            await asyncio.sleep(delay)
            waited += delay

    async def _answers(self) -> bool:
        """Whether a request that succeeded before succeeds now."""
        return self._answerable is not None and (await self._ask(self._answerable)).answered


# A service over HTTP: one POST a request, JSON both ways. Messages quote nothing of a failed response: it may contain
# what was sent, keys too.


_BUSY = (408, 425, 429)
_INDEPENDENT_OF_REQUEST = (401, 402, 403, 404, 405, 407)
"""HTTP statuses that do not depend on the request."""


class Service:
    """A service at one address. Its client belongs to the event loop that sends the first request."""

    def __init__(self, url: str, key_env: str | None, timeout: float, at_once: int) -> None:
        """Set the address and the limits; nothing is sent.

        Args:
            key_env: environment variable with the key, which is sent as a bearer token.
            timeout: seconds for a response.
        """
        self._url = url
        self._key_env = key_env
        self._timeout = timeout
        self._at_once = at_once
        self._client: Any = None
        """An `httpx.AsyncClient`, from the first request on."""

    async def post(self, question: Any) -> Any:
        """Return the JSON value of the response.

        Raises:
            TryAgain: the service does not respond now.
            GraderFailed: the service refuses any request, or its key is missing.
            ValueError: the service refuses this request, or the response is no JSON.
        """
        import httpx  # takes long, and only a grader's process makes requests

        if self._client is None:
            limits = httpx.Limits(max_connections=self._at_once, max_keepalive_connections=self._at_once)
            self._client = httpx.AsyncClient(timeout=self._timeout, limits=limits)
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.post(self._url, json=question, headers=self._headers())
        except (TimeoutError, httpx.TimeoutException):
            raise TryAgain(f"{self._url} did not respond within {self._timeout:g} s") from None
        except httpx.TransportError as error:
            raise TryAgain(f"{self._url} does not respond ({type(error).__name__})") from None
        status = reply.status_code
        if status in _BUSY or status >= 500:
            raise TryAgain(f"{self._url} responds with HTTP status {status}")
        if status in _INDEPENDENT_OF_REQUEST or 300 <= status < 400:
            key = f"the key in the environment variable {self._key_env}" if self._key_env else "whether it needs a key"
            raise GraderFailed(f"{self._url} responds with HTTP status {status}: check the address, and {key}")
        if status >= 400:
            raise ValueError(f"{self._url} refuses this sample with HTTP status {status}")
        try:
            return from_json(reply.content)
        except ValueError:
            raise ValueError(
                f"{self._url} responds with something else than JSON, or with JSON nested too deeply"
            ) from None

    async def close(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.aclose()

    def _headers(self) -> dict[str, str]:
        if self._key_env is None:
            return {}
        key = os.environ.get(self._key_env, "").strip()
        if not key:
            raise GraderFailed(f"the environment variable {self._key_env} is empty: set it to the key for {self._url}")
        return {"Authorization": f"Bearer {key}"}


def source_version(*modules: str | ModuleType) -> str:
    """Return a digest of the source of modules; those of this package are named by text."""
    digest = hashlib.sha256()
    for module in modules:
        file = Path(__file__).with_name(f"{module}.py") if isinstance(module, str) else Path(str(module.__file__))
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
