"""Runs `generate` for many samples at once: each is a coroutine on one loop, and all that ask are answered together.

| what happens to a sample | what becomes of it |
|---|---|
| `generate` returns | its trajectory, or its trajectories, checked |
| `generate` raises, or the engine refuses what it asks and it does not mind | it fails, with the error |
| it is aborted | it is given back as far as its first call came; what its code was given is recorded |
| it does something else than is recorded, or an effect is uncertain | it fails, with what its recorder says |
| what `generate` returned is no trajectory of the sample | BadTrajectory, for the whole call |

Whoever holds the engine gives the answers: `cairn.engines.episodes.samples` where the function is ours, and the process
of the user's function (`user_process.py`) through it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

from cairn.engines.episodes.call_ids import begin_sample, sample_of, task_factory
from cairn.engines.episodes.context import Context
from cairn.engines.episodes.options import EpisodeOptions
from cairn.engines.episodes.recorder import EpisodeDiverged, Recorder, SampleAborted
from cairn.engines.episodes.records import NEVER, CallRecord, Recorded
from cairn.engines.episodes.waits import Waits
from cairn.engines.errors import RequestRefused
from cairn.engines.tools.results import shortened
from cairn.engines.tools.tool import Tool
from cairn.engines.trajectories import BadTrajectory, GeneratedSample, SampleKey, SampleRequest, Trajectory
from cairn.engines.types import Completion, FinishReason, GenerateRequest, RequestId, SamplingParams

_TO_END = 5.0
"""Seconds in which what is cancelled has to end."""
_TOGETHER = 0.02
"""Seconds for which what is recorded may wait for more, where nobody waits for it to be durable."""
_LONGEST_ERROR = 4000
"""Characters of what is told of a sample's error."""

Generate = Callable[[Context, SampleRequest], Awaitable[Trajectory | list[Trajectory]]]


class Runner:
    """The samples of one call. All of it is for the thread of its loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        generate: Generate,
        params: SamplingParams,
        tokenizer: Callable[[], Any],
        tools: Callable[[], Mapping[str, Tool]] = dict,
        options: EpisodeOptions | None = None,
    ) -> None:
        """`tokenizer` loads the model's and `tools` those of the run, where a sample asks for them."""
        loop.set_task_factory(task_factory)
        self._loop = loop
        self._generate = generate
        self._params = params
        self._tokenizer = tokenizer
        self._tools = tools
        self._options = options
        self._tasks: dict[SampleKey, asyncio.Task[None]] = {}
        self._answers: dict[RequestId, asyncio.Future[Completion]] = {}
        self._asking: Counter[RequestId] = Counter()
        self._recorders: dict[SampleKey, Recorder] = {}
        self._recorded: list[CallRecord] = []
        self._due = False
        """Whether the first of them has waited long enough."""
        self._to_acknowledge: list[asyncio.Future[None]] = []
        """Of the samples that wait until what is recorded is durable."""
        self._acknowledging: dict[int, list[asyncio.Future[None]]] = {}
        self._numbers = count(time.monotonic_ns())
        """Above those of processes before this one: what is acknowledged to them late means nothing here."""
        self._log_is_lost = False
        self._aborted = False
        self._failure: BadTrajectory | None = None
        self._stir = asyncio.Event()
        self.waits = Waits()
        """Of samples whose tools have to wait."""
        self.asked: list[GenerateRequest] = []
        """What samples ask the engine, for its holder to take away and to `answer`."""
        self.ended: list[GeneratedSample] = []
        """Samples that have ended, for it to take away."""

    def begin(self, samples: Sequence[SampleRequest]) -> None:
        """Begin to generate samples."""
        self._tasks |= {sample.key: self._loop.create_task(self._run(sample)) for sample in samples}

    @property
    def left(self) -> int:
        """Samples that have not ended. Raises BadTrajectory."""
        if self._failure is not None:
            raise self._failure
        return len(self._tasks)

    async def stirred(self) -> None:
        """Return when samples have asked or ended since, and all that could go on have."""
        await self._stir.wait()
        await asyncio.sleep(0)  # behind those that are about to
        self._stir.clear()

    @property
    def at_work(self) -> bool:
        """Whether a sample has something else to do than to wait for the engine."""
        return self._failure is None and len(self._tasks) > len(self._asking)

    def answer(self, id: RequestId, answer: Completion | RequestRefused) -> None:
        """What the engine made of a request."""
        future = self._answers.pop(id)
        self._no_longer_asks(id)
        if future.done():
            return  # its sample has ended without it
        if isinstance(answer, RequestRefused):
            future.set_exception(answer)
        else:
            self._aborted = self._aborted or answer.finish_reason == FinishReason.ABORT
            future.set_result(answer)

    def recorded(self) -> Recorded | None:
        """What samples were given, for its holder to take away and, where that is awaited, to `acknowledge`; before
        what has `ended` with it. None where it waits for more."""
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
        """What came with this number, and all before it, is durable. `NEVER`: nothing becomes durable any more; all
        samples are given back, and no effect that waits for that is made."""
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
        """Give all samples back: those that ask the engine when it answers, those in a call with effects when they ask
        it next, the others at once."""
        self._aborted = True
        for key, task in self._tasks.items():
            acting = key in self._recorders and self._recorders[key].acting
            if key not in self._asking and not acting:
                task.cancel()

    @property
    def aborted(self) -> bool:
        """Whether samples are given back."""
        return self._aborted

    @property
    def working(self) -> list[SampleKey]:
        """Samples that wait for something else than the engine, or are about to go on."""
        return [key for key in self._tasks if key not in self._asking]

    @property
    def unfinished(self) -> list[SampleKey]:
        """Samples that have not ended."""
        return list(self._tasks)

    def give_up(self, key: SampleKey, why: str) -> None:
        """Let a sample fail, whatever it is at."""
        awaited = self._recorders[key].awaited if key in self._recorders else None
        if awaited is not None:
            why += f": its code has not asked for {awaited.told} again, which was recorded"
        self._tasks[key].cancel()
        self._end(GeneratedSample(*key, Trajectory(()), FinishReason.ERROR, why))

    def current(self) -> SampleKey | None:
        """The sample whose code, or a tool of its, runs now, for other threads; it may have ended."""
        task = asyncio.current_task(self._loop)
        return None if task is None else sample_of(task)

    def close(self) -> bool:
        """End everything. Whether all of it has."""
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
        self._asking.pop(ended.key, None)
        self.ended.append(ended)
        self._stir.set()

    async def _ask(self, request: GenerateRequest) -> Completion:
        if self._aborted:
            raise SampleAborted
        future = self._answers[request.request_id] = self._loop.create_future()
        self._asking[request.request_id[:2]] += 1
        self.asked.append(request)
        self._stir.set()
        return await future

    def _record(self, record: CallRecord) -> None:
        if not self._recorded:
            self._loop.call_later(_TOGETHER, self._is_due)
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

    def _no_longer_asks(self, id: RequestId) -> None:
        if self._asking[id[:2]] > 1:
            self._asking[id[:2]] -= 1
        else:
            del self._asking[id[:2]]


async def outcome(
    generate: Generate, context: Context, sample: SampleRequest, recorder: Recorder, aborted: Callable[[], bool]
) -> GeneratedSample:
    """What becomes of a sample. `aborted`: whether all are given back. Raises BadTrajectory."""
    try:
        returned = await generate(context, sample)
        if recorder.failure is not None:  # whatever the code made of it
            raise recorder.failure
        ended = context.checked(returned)
        if recorder.awaited is not None:
            raise EpisodeDiverged(f"the code ended without {recorder.awaited.told}, which is recorded")
        return ended
    except SampleAborted:
        return context.aborted()
    except asyncio.CancelledError as error:  # without an abort, it waited for a task of its own that was cancelled
        failure = recorder.failure or error
        return context.aborted() if aborted() else GeneratedSample.failed(sample, told_of(failure))
    except (BadTrajectory, KeyboardInterrupt):
        raise
    # It is user code: whatever it raises is the result of this sample, and no other is to suffer from it.
    except BaseException as error:
        failure = recorder.failure or error
        if isinstance(failure, SampleAborted):
            return context.aborted()
        return GeneratedSample.failed(sample, told_of(failure))


def told_of(error: BaseException) -> str:
    """What is told of an error of a sample's code."""
    if isinstance(error, RequestRefused):
        return "; ".join(error.refused.values())
    try:
        said = str(error)
    except Exception:
        said = "it cannot say what"
    return shortened(f"generate: {type(error).__name__}: {said}", _LONGEST_ERROR)
