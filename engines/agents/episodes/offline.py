"""Offline replay of a sample's code from its recorded calls, without an engine, tools, graders or a clock.

What the code does outside its context, such as an HTTP request of its own, it does again.
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
"""Seconds without a response after which waiting code is stopped, where it waits for a later response than the next
recorded one. Time in which the code computes, or is paused in a debugger, does not count."""
STUCK_WITH_TIMER = 60.0
"""Like `STUCK`, for code that also waits for a timer, as in `asyncio.timeout`."""

OnReceived = Callable[[CallRecord], None]
"""Called with each record that the code has received."""


class NotRecorded(BaseException):
    """The code makes a call that is not in the record. User code must not catch it."""


class _FromRecord(Recorder):
    """Returns recorded responses and no others."""

    def __init__(
        self, recorded: Iterable[CallRecord], tasks: "Collection[asyncio.Task[Any]]", on_received: OnReceived
    ) -> None:
        super().__init__(recorded, tasks, _no_sink, _no_sink)
        self._on_received = on_received
        self._not_recorded: dict[str, CallRecord] = {}
        """Calls in flight that have no recorded response."""
        self._stuck = 0.0
        """Seconds for which the code has been stuck."""

    def value(self, record: CallRecord, make: Callable[[], str]) -> str:
        self._require(record)
        value = super().value(record, make)
        self._received(self._known[record.call])
        return value

    async def answer(
        self,
        record: CallRecord,
        do: Callable[[CallRecord], Awaitable[CallRecord]],
        *,
        repeat: bool = False,
        durable: bool = False,
    ) -> CallRecord:
        """Return the recorded response as it is, even where a normal replay repeats the call to rebuild a tool's state.

        A call without a record was cancelled in the original run: it waits until it is cancelled again.
        """
        if self._known_as(record) is None:
            self._not_recorded[record.call] = record
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                del self._not_recorded[record.call]
        record = await super().answer(record, do)
        self._received(record)
        return record

    def require_moving(self, seconds: float) -> None:
        """Raise where the code cannot make progress.

        EpisodeDiverged: the code waits for a response that comes after one that it has not requested. NotRecorded: it
        waits for a response that is not recorded. `seconds`: time since the last check.
        """
        awaited = self.awaited
        if not (self._requested or self._not_recorded) or not self._is_quiet():
            self._stuck = 0.0
            return
        self._stuck += seconds
        timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
        by_the_clock = any(not timer.cancelled() for timer in timers)
        if self._stuck < (STUCK_WITH_TIMER if by_the_clock else STUCK):
            return
        if awaited is None or not self._requested:
            for record in self._not_recorded.values():
                self._require(record)
            return
        waits = ", ".join(sorted(self._requested))
        raise EpisodeDiverged(
            f"the code waits for {waits}, but has not made {awaited.description}, recorded before that"
        )

    def _require(self, record: CallRecord) -> None:
        if self._known_as(record) is None:
            orphan = "was under way when its process was lost" if self.is_orphan(record) else "is not in the record"
            raise NotRecorded(f"{record.description} {orphan}: a replay makes no new calls")

    def _received(self, record: CallRecord) -> None:
        self._stuck = 0.0
        self._on_received(record)


def replay(
    sample: SampleRequest,
    generate: Generate,
    params: SamplingParams,
    *,
    tokenizer: Callable[[], Any],
    tools: Callable[[], Mapping[str, Tool]],
    options: EpisodeOptions,
    on_received: OnReceived = lambda record: None,
) -> GeneratedSample:
    """Run a sample's code from `sample.recorded`, on an event loop of its own in this thread.

    Raises NotRecorded, EpisodeDiverged where the code makes other calls than before or ends without making all recorded
    ones, and any error of the code. `on_received` is called with each record that the code has received.
    """
    recorders: list[_FromRecord] = []

    async def run() -> GeneratedSample:
        recorder = _FromRecord(sample.recorded, begin_sample(sample.key), on_received)
        recorders.append(recorder)
        context = Context(sample, params, _no_engine, tokenizer, recorder, tools, options)
        ended = context.checked(await generate(context, sample))
        if recorder.awaited is not None:
            raise EpisodeDiverged(f"the code ended without {recorder.awaited.description}, which is recorded")
        return ended

    async def watched() -> GeneratedSample:
        task = asyncio.create_task(run())
        while not (await asyncio.wait([task], timeout=_TICK))[0]:
            recorders[0].require_moving(_TICK)
        return task.result()

    loop = asyncio.new_event_loop()
    loop.set_task_factory(task_factory)
    try:
        return loop.run_until_complete(watched())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _no_engine(request: GenerateRequest) -> Completion:
    raise AssertionError("what is not recorded is refused before")


def _no_sink(record: CallRecord) -> NoReturn:
    raise AssertionError("nothing new comes up")
