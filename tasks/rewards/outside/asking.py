"""Asking something outside about many samples at a time, so that a sample fails by its answer, and by nothing else.

| what comes back | what becomes of the sample |
|---|---|
| an answer with a reward | that is its reward |
| an answer without one, such as a judge's reply without a score | it fails, with the error |
| a refusal of this very question | the same |
| none in time, a lost connection, HTTP status 408, 425, 429 or 5xx | it is asked again, then it fails |
| the same, and then a question that was answered before gets no answer either | neither fails: GraderUnavailable |
| a refusal of any question, such as a wrong key | none fails: GraderFailed |

How often it is asked again, and after which waits, says `retry.grader`.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Hashable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from typing import Any, Protocol

from cairn.configs.schema.operations import GraderRetries
from cairn.tasks.rewards import TryAgain
from cairn.tasks.rewards.pool import Graded
from cairn.tasks.rewards.process import GraderFailed, GraderUnavailable
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.rewards.worker import Whose, whose

_TO_END = 10.0
"""Seconds that questions under way may take to be given up."""

Answered = Callable[[int, Graded], None]
"""(position of the sample, what was answered): called as soon as an answer has come."""


class Outside(Protocol):
    """What is asked."""

    name: str
    version: str
    """Changes whenever the same question may get another answer."""
    at_once: int
    """Questions under way at a time."""

    def question(self, sample: Sample) -> Any:
        """What is asked about a sample, JSON values: all that the answer depends on besides the version. Raises
        ValueError where nothing can be asked about it."""

    async def answer(self, question: Any) -> Graded:
        """Its reward, or the error that this question always ends in. Raises TryAgain, GraderFailed,
        GraderUnavailable, and anything else where this very question is refused."""

    async def close(self) -> None:
        """Let go of connections."""


@dataclass(frozen=True)
class _Tried:
    graded: Graded
    answered: bool
    transient: bool = False


class OutsideGraders:
    """A grader that asks something outside, in an event loop of its own. Thread-safe."""

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
        """A question that got a reward."""
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"grader-{outside.name}", daemon=True)
        self._thread.start()

    @property
    def name(self) -> str:
        """Of the grader."""
        return self._outside.name

    @property
    def version(self) -> str:
        """Of the grader: it changes with its code and with what is asked how."""
        return self._outside.version

    def question(self, sample: Sample) -> Any:
        """See `Outside.question`."""
        return self._outside.question(sample)

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Itself."""
        return self.name, self.version

    def can_grade(self, sample: Sample) -> None:
        """See `Rememberable.can_grade`."""
        if self._answerable is None:
            self._answerable = self._outside.question(sample)

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """See `Grading.grade`, and the module for what fails a sample."""
        return self.ask(samples)

    def ask(self, samples: Sequence[Sample], answered: Answered = lambda position, graded: None) -> list[Graded]:
        """Grade a batch. `answered` hears, in another thread, of every answer at once; not of a sample that failed by
        anything else. Raises as `grade`."""
        return self._run(self._ask_all(samples, answered))

    def close(self) -> None:
        """Give up what is under way."""
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

    async def _ask_all(self, samples: Sequence[Sample], answered: Answered) -> list[Graded]:
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
                f"tries, and now not even what it graded before: {left[0].graded.error}"
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
                told = str(error) if isinstance(error, TryAgain | ValueError) else f"{type(error).__name__}: {error}"
                match whose(error, self._retries.errors, limited=False):
                    case Whose.MACHINE:
                        raise GraderUnavailable(f"grader {self.name}: {told}") from error
                    case Whose.SERVICE:
                        delay = next(delays, None)
                    case _:
                        return _Tried(Graded(None, error=told, tries=tries, waited=waited), answered=False)
                if delay is None:
                    return _Tried(Graded(None, error=told, tries=tries, waited=waited), answered=False, transient=True)
            await asyncio.sleep(delay)
            waited += delay

    async def _answers(self) -> bool:
        """Whether a question is answered now that was answered before."""
        return self._answerable is not None and (await self._ask(self._answerable)).answered
