"""Concurrent execution of `generate`: each sample is a coroutine on one loop, and the engine batches their requests.

| event of a sample | result |
|---|---|
| `generate` returns | its checked trajectories |
| `generate` raises, or does not catch the engine's refusal of a request | it fails with the error |
| it is aborted | its first call's tokens are returned; the record holds what its code received |
| its code diverges from the record, or an effect is uncertain | it fails with its recorder's error |
| `generate` returns no trajectory of the sample | BadTrajectory, for the whole call |

The holder of the engine supplies the responses: `cairn.engines.agents.episodes.samples`, through which the process of
a user's function (`user_process.py`) reaches it."""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain, count
from typing import Any

from cairn.configs.errors import message_of
from cairn.engines.agents.episodes.context import Context, EpisodeOptions
from cairn.engines.agents.episodes.recorder import (
    EpisodeDiverged,
    Recorder,
    SampleAborted,
    begin_sample,
    sample_of,
    task_factory,
)
from cairn.engines.agents.tools.results import shortened
from cairn.engines.agents.tools.tool import Tool
from cairn.engines.types.errors import RequestRefused
from cairn.engines.types.places import with_place
from cairn.engines.types.trajectories import (
    NEVER,
    BadTrajectory,
    CallRecord,
    GeneratedSample,
    Recorded,
    SampleKey,
    SampleRequest,
    Trajectory,
)
from cairn.engines.types.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams

# Time that samples wait for resources that others hold, such as a tool process: it does not count as their own.


class Waits:
    """Waiting times of the samples of a loop."""

    def __init__(self) -> None:
        self._calls: Counter[SampleKey] = Counter()
        """Number of waiting calls of each sample."""
        self._since: dict[SampleKey, float] = {}
        self._seconds: defaultdict[SampleKey, float] = defaultdict(float)

    @contextmanager
    def of(self, key: SampleKey) -> Iterator[None]:
        """Count the time meanwhile as waiting time of a sample. Overlapping waits count once."""
        if not self._calls[key]:
            self._since[key] = time.monotonic()
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                self._seconds[key] += time.monotonic() - self._since.pop(key)

    def seconds(self, key: SampleKey) -> float:
        """Return the total waiting time of a sample in seconds."""
        since = self._since.get(key)
        return self._seconds[key] + (0.0 if since is None else time.monotonic() - since)


_TO_END = 5.0
"""Seconds that cancelled tasks have to end."""
_BATCH_SECONDS = 0.02
"""Maximum seconds that records are batched while no sample waits for their durability."""
_LONGEST_ERROR = 4000
"""Maximum characters of a sample's error message."""

Generate = Callable[[Context, SampleRequest], Awaitable[Trajectory | list[Trajectory]]]


class Runner:
    """The samples of one call. All methods run in the thread of its loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        generate: Generate,
        params: SamplingParams,
        tokenizer: Callable[[], Any],
        tools: Callable[[], Mapping[str, Tool]] = dict,
        options: EpisodeOptions | None = None,
    ) -> None:
        """Create a runner. `tokenizer` and `tools` load the model's tokenizer and the run's tools when a sample needs
        them."""
        loop.set_task_factory(task_factory)
        self._loop = loop
        self._generate = generate
        self._params = params
        self._tokenizer = tokenizer
        self._tools = tools
        self._options = options
        self._tasks: dict[SampleKey, asyncio.Task[None]] = {}
        self._answers: dict[RequestId, asyncio.Future[Completion]] = {}
        self._in_flight: Counter[RequestId] = Counter()
        self._recorders: dict[SampleKey, Recorder] = {}
        self._recorded: list[CallRecord] = []
        self._due = False
        """Whether the oldest unsent record has waited long enough."""
        self._to_acknowledge: list[asyncio.Future[None]] = []
        """Futures of samples that wait for the durability of unsent records."""
        self._acknowledging: dict[int, list[asyncio.Future[None]]] = {}
        self._numbers = count(time.monotonic_ns())
        """Numbers of batches, above those of earlier processes, so that late acknowledgements of theirs have no
        effect."""
        self._log_is_lost = False
        self._aborted = False
        self._failure: BadTrajectory | None = None
        self._stir = asyncio.Event()
        self.waits = Waits()
        """Waiting times of samples whose tools have to wait."""
        self.requests: list[GenerateRequest] = []
        """Requests to the engine, for its holder to take and to `answer`."""
        self.ended: list[GeneratedSample] = []
        """Samples that have ended, for the engine's holder to take."""

    def begin(self, samples: Sequence[SampleRequest]) -> None:
        """Start samples."""
        self._tasks |= {sample.key: self._loop.create_task(self._run(sample)) for sample in samples}

    @property
    def left(self) -> int:
        """Number of samples that have not ended. Raises BadTrajectory."""
        if self._failure is not None:
            raise self._failure
        return len(self._tasks)

    async def changed(self) -> None:
        """Wait until samples have sent requests or ended, and all that can continue have continued."""
        await self._stir.wait()
        await asyncio.sleep(0)  # behind those that are about to
        self._stir.clear()

    @property
    def is_busy(self) -> bool:
        """Whether a sample is doing something else than waiting for the engine."""
        return self._failure is None and len(self._tasks) > len(self._in_flight)

    def answer(self, id: RequestId, answer: Completion | RequestRefused) -> None:
        """Deliver the engine's response to a request."""
        future = self._answers.pop(id)
        self._request_ended(id)
        if future.done():
            return  # its sample has ended without it
        if isinstance(answer, RequestRefused):
            future.set_exception(answer)
        else:
            self._aborted = self._aborted or answer.finish_reason == FinishReason.ABORT
            future.set_result(answer)

    def recorded(self) -> Recorded | None:
        """Return new records for the engine's holder, which has to `acknowledge` them where they are awaited.

        To be taken before `ended`. Returns None where it waits for more records.
        """
        if not self._recorded or not (self._due or self._to_acknowledge or self.ended):
            return None
        self._due = False
        records, self._recorded = self._recorded, []
        awaited, self._to_acknowledge = self._to_acknowledge, []
        number = next(self._numbers)
        if awaited:
            self._acknowledging[number] = awaited
        return Recorded(number, records, bool(awaited))

    def acknowledge(self, number: int) -> None:
        """Mark the records with this number, and all before them, as durable.

        `NEVER`: nothing becomes durable any more. All samples are aborted, and no effect that waits for durability is
        made.
        """
        if number == NEVER:
            self._log_is_lost = True
            self.abort()
            for future in (*self._to_acknowledge, *chain.from_iterable(self._acknowledging.values())):
                future.cancel()
            return
        for waiting in [one for one in self._acknowledging if one <= number]:
            for future in self._acknowledging.pop(waiting):
                if not future.done():
                    future.set_result(None)

    def abort(self) -> None:
        """Abort all samples.

        Those with an open request end at its response, those in a call with effects at their next request, the others
        at once.
        """
        self._aborted = True
        for key, task in self._tasks.items():
            acting = key in self._recorders and self._recorders[key].acting
            if key not in self._in_flight and not acting:
                task.cancel()

    @property
    def working(self) -> list[SampleKey]:
        """Samples that are not waiting for the engine."""
        return [key for key in self._tasks if key not in self._in_flight]

    @property
    def unfinished(self) -> list[SampleKey]:
        """Samples that have not ended."""
        return list(self._tasks)

    def give_up(self, key: SampleKey, why: str) -> None:
        """Fail a sample, whatever its code is doing."""
        awaited = self._recorders[key].awaited if key in self._recorders else None
        if awaited is not None:
            why += f": its code has not repeated {awaited.description}, which was recorded"
        self._tasks[key].cancel()
        self._end(GeneratedSample(*key, Trajectory(()), FinishReason.ERROR, why))

    def current(self) -> SampleKey | None:
        """Return the sample whose code or tool is running now; thread-safe. The sample may have ended."""
        task = asyncio.current_task(self._loop)
        return None if task is None else sample_of(task)

    def close(self) -> bool:
        """Cancel everything. Return whether all tasks have ended."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        if tasks:
            _, tasks = self._loop.run_until_complete(asyncio.wait(tasks, timeout=_TO_END))
        if not tasks:
            self._loop.close()
        return not tasks

    async def _run(self, sample: SampleRequest) -> None:
        recorder = Recorder(
            sample.recorded, begin_sample(sample.key), self._record, self._record_durably, resampled=sample.resampled
        )
        self._recorders[sample.key] = recorder
        waits = partial(self.waits.of, sample.key)
        context = Context(sample, self._params, self._ask, self._tokenizer, recorder, self._tools, self._options, waits)
        try:
            ended = await outcome(self._generate, context, sample, recorder, lambda: self._aborted)
        except BadTrajectory as error:
            self._failure = error
            self._stir.set()
            return
        if sample.key in self._tasks:  # and was not given up
            self._end(ended)

    def _end(self, ended: GeneratedSample) -> None:
        del self._tasks[ended.key]
        if (recorder := self._recorders.pop(ended.key, None)) is not None:
            recorder.end()
        self._in_flight.pop(ended.key, None)
        self.ended.append(ended)
        self._stir.set()

    async def _ask(self, request: GenerateRequest) -> Completion:
        if self._aborted:
            raise SampleAborted
        future = self._answers[request.request_id] = self._loop.create_future()
        self._in_flight[request.request_id[:2]] += 1
        self.requests.append(request)
        self._stir.set()
        return await future

    def _record(self, record: CallRecord) -> None:
        if not self._recorded:
            self._loop.call_later(_BATCH_SECONDS, self._is_due)
        self._recorded.append(record)

    def _is_due(self) -> None:
        self._due = bool(self._recorded)
        self._stir.set()

    def _record_durably(self, record: CallRecord) -> "asyncio.Future[None]":
        self._record(record)
        future: asyncio.Future[None] = self._loop.create_future()
        if self._log_is_lost:
            future.cancel()
            return future
        self._to_acknowledge.append(future)
        self._stir.set()
        return future

    def _request_ended(self, id: RequestId) -> None:
        if self._in_flight[id[:2]] > 1:
            self._in_flight[id[:2]] -= 1
        else:
            del self._in_flight[id[:2]]


async def outcome(
    generate: Generate, context: Context, sample: SampleRequest, recorder: Recorder, aborted: Callable[[], bool]
) -> GeneratedSample:
    """Run a sample and return its result. `aborted`: whether all samples are aborted. Raises BadTrajectory."""
    try:
        returned = await generate(context, sample)
        if recorder.failure is not None:  # whatever the code made of it
            raise recorder.failure
        ended = context.checked(returned)
        if recorder.awaited is not None:
            raise EpisodeDiverged(f"the code ended without {recorder.awaited.description}, which is recorded")
        return ended
    except SampleAborted:
        return context.aborted()
    except asyncio.CancelledError as error:  # without an abort, it waited for a task of its own that was cancelled
        failure = recorder.failure or error
        return context.aborted() if aborted() else GeneratedSample.failed(sample, error_message(failure, generate))
    except (BadTrajectory, KeyboardInterrupt):
        raise
    # User code may raise anything: it is the result of this sample and must not affect others.
    except BaseException as error:
        failure = recorder.failure or error
        if isinstance(failure, SampleAborted):
            return context.aborted()
        return GeneratedSample.failed(sample, error_message(failure, generate))


def error_message(error: BaseException, generate: Generate) -> str:
    """Return the message of an error of a sample's code, with its place there."""
    if isinstance(error, RequestRefused):
        return "; ".join(error.refused.values())
    text = f"generate: {type(error).__name__}: {message_of(error)}"
    return with_place(shortened(text, _LONGEST_ERROR), error, generate)
