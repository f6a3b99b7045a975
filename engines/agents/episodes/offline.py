"""A sample's code again, from what it was given then: no engine, and no tool, grader or clock, is asked anything.

What the code does past its context, such as a request of its own, it does again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, NoReturn

from cairn.engines.agents.episodes.context import Context, EpisodeOptions
from cairn.engines.agents.episodes.recorder import EpisodeDiverged, Recorder, begin_sample, task_factory
from cairn.engines.agents.episodes.runner import Generate
from cairn.engines.agents.tools.tool import Tool
from cairn.engines.types.trajectories import CallRecord, GeneratedSample, SampleRequest
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams

_TICK = 0.2
STUCK = 5.0
"""Seconds without an answer after which code that waits for one, and has not asked for the one before it, is stopped;
those in which it computes, or stands in a debugger, do not count."""
BY_THE_CLOCK = 60.0
"""The same where it waits for the clock as well, as in `asyncio.timeout`."""

Given = Callable[[CallRecord], None]
"""Is told each answer when the code has been given it."""


class NotRecorded(BaseException):
    """The code asks for what it was not given then. Not for user code to catch."""


class _FromRecord(Recorder):
    """Gives what is recorded and nothing else."""

    def __init__(self, recorded: Iterable[CallRecord], tasks: "Collection[asyncio.Task[Any]]", given: Given) -> None:
        super().__init__(recorded, tasks, _nobody_hears, _nobody_hears)
        self._given = given
        self._not_recorded: dict[str, CallRecord] = {}
        """Calls that the code waits for, and that nobody answered then."""
        self._stuck = 0.0
        """Seconds that the code has waited so."""

    def value(self, record: CallRecord, make: Callable[[], str]) -> str:
        self._require(record)
        value = super().value(record, make)
        self._tell(self._known[record.call])
        return value

    async def answer(
        self,
        asked: CallRecord,
        do: Callable[[CallRecord], Awaitable[CallRecord]],
        *,
        again: bool = False,
        durable: bool = False,
    ) -> CallRecord:
        """A recorded answer is given as it is, also where the tool's state would be built up again by asking it. One
        that is not recorded was broken off then: it waits until it is again."""
        if self._known_as(asked) is None:
            self._not_recorded[asked.call] = asked
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                del self._not_recorded[asked.call]
        record = await super().answer(asked, do)
        self._tell(record)
        return record

    def require_moving(self, seconds: float) -> None:
        """Raise EpisodeDiverged where the code waits for an answer that comes after one that it has not asked for, and
        NotRecorded where it waits for one that is not recorded. `seconds`: since it was looked at last."""
        awaited = self.awaited
        if not (self._asked or self._not_recorded) or not self._is_quiet():
            self._stuck = 0.0
            return
        self._stuck += seconds
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        by_the_clock = any(not timer.cancelled() for timer in timers)
        if self._stuck < (BY_THE_CLOCK if by_the_clock else STUCK):
            return
        if awaited is None or not self._asked:
            for asked in self._not_recorded.values():
                self._require(asked)
            return
        waits = ", ".join(sorted(self._asked))
        raise EpisodeDiverged(f"the code waits for {waits}, and has not asked for {awaited.told}, recorded before that")

    def _require(self, asked: CallRecord) -> None:
        if self._known_as(asked) is None:
            orphan = "was under way when its process was lost" if self.is_orphan(asked) else "is not in the record"
            raise NotRecorded(f"{asked.told} {orphan}: a replay asks nobody")

    def _tell(self, record: CallRecord) -> None:
        self._stuck = 0.0
        self._given(record)


def again(
    sample: SampleRequest,
    generate: Generate,
    params: SamplingParams,
    *,
    tokenizer: Callable[[], Any],
    tools: Callable[[], Mapping[str, Tool]],
    options: EpisodeOptions,
    given: Given = lambda record: None,
) -> GeneratedSample:
    """Run a sample's code from `sample.recorded`, on a loop of its own in this thread.

    Raises NotRecorded, EpisodeDiverged where the code asks other things than it did, or ends without asking for all
    that is recorded, and whatever the code raises.
    """
    loop = asyncio.new_event_loop()
    loop.set_task_factory(task_factory)
    try:
        return loop.run_until_complete(_again(sample, generate, params, tokenizer, tools, options, given))
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _again(
    sample: SampleRequest,
    generate: Generate,
    params: SamplingParams,
    tokenizer: Callable[[], Any],
    tools: Callable[[], Mapping[str, Tool]],
    options: EpisodeOptions,
    given: Given,
) -> GeneratedSample:
    async def run() -> GeneratedSample:
        recorder = recorders[0] = _FromRecord(sample.recorded, begin_sample(sample.key), given)
        context = Context(sample, params, _no_engine, tokenizer, recorder, tools, options)
        ended = context.checked(await generate(context, sample))
        if recorder.awaited is not None:
            raise EpisodeDiverged(f"the code ended without {recorder.awaited.told}, which is recorded")
        return ended

    recorders: dict[int, _FromRecord] = {}
    task = asyncio.create_task(run())
    while not (await asyncio.wait([task], timeout=_TICK))[0]:
        recorders[0].require_moving(_TICK)
    return task.result()


async def _no_engine(request: GenerateRequest) -> Completion:
    raise AssertionError("what is not recorded is refused before")


def _nobody_hears(record: CallRecord) -> NoReturn:
    raise AssertionError("nothing new comes up")
