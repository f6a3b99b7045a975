r"""Record and replay of a sample's calls.

The code receives responses one at a time, each after it has done all that it could with the earlier ones. What it does
therefore depends only on the order of responses, which is recorded. When the code runs again it receives the recorded
responses in that order, each after it has made the call, and then continues with new ones. `asyncio.gather`, queues and
tasks of its own are supported. What it waits for outside its context, such as a clock or a socket, is not recorded.

| the code makes | the record holds | the code receives |
|---|---|---|
| the same call as before | the response | that response; a `deterministic` tool runs again and must return the same |
| a call of the same id with another name or other arguments | a response | EpisodeDiverged |
| a new call | nothing | a new response, after all recorded ones |
| a call with effects | only the intent | the result of `reconcile`, or of the same call with its key, or \
UncertainEffect |

Errors that end the sample, such as EpisodeDiverged and UncertainEffect, end it even if its code catches them:
`asyncio.gather` may return errors as values. A cancelled call gets no response. Only for a call with effects, a
response that has arrived is recorded nevertheless. Tasks that the code leaves running at its end make no more calls.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from cairn.engines.agents.tools.errors import ToolUnavailable
from cairn.engines.types.trajectories import CallKind, CallRecord, SampleKey

# Ids of calls: the path of the asyncio task and a counter, so that ids of concurrent calls do not depend on their
# order.
#
# Each kind of call has a counter. A sample's calls of the policy are `0`, `1`, …; those of the first task that it
# starts `t0.0`, …; those of that task's second child `t0.t1.0`, …. Calls of tools are `c0`, `c1`, …, of graders `j0`,
# of the clock `n0`, random generators `r0`. The loop's task factory numbers tasks as they are created.


@dataclass
class _Place:
    """A task of a sample, and the counters of its calls."""

    sample: SampleKey
    tasks: "WeakSet[asyncio.Task[Any]]"
    """All tasks of the sample."""
    path: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    children: int = 0
    outside_code: bool = False
    """Whether the task carries out a call. Nothing in it is counted, since a replay, which has the response, skips
    it."""


_place: ContextVar[_Place] = ContextVar("place")
_samples: "WeakKeyDictionary[asyncio.Task[Any], SampleKey]" = WeakKeyDictionary()
"""Samples by their tasks, including the tasks that their calls started."""


def begin_sample(key: SampleKey) -> "WeakSet[asyncio.Task[Any]]":
    """Count the calls of the current task from now on. Return the sample's tasks: this one and all that it will
    start."""
    task = asyncio.current_task()
    assert task is not None
    tasks = WeakSet([task])
    _place.set(_Place(key, tasks))
    _samples[task] = key
    return tasks


def context_of(key: SampleKey) -> Context:
    """Return a context for the code of a sample that starts no tasks: calls within it count as the sample's."""
    context = copy_context()
    context.run(_place.set, _Place(key, WeakSet()))
    return context


def sample_of(task: "asyncio.Task[Any]") -> SampleKey | None:
    """Return the sample that a task belongs to."""
    return _samples.get(task)


def sample_in(context: Context) -> SampleKey | None:
    """Return the sample whose code runs in a context."""
    place = context.get(_place)
    return None if place is None else place.sample


@contextmanager
def outside_code() -> Iterator[None]:
    """Mark what the current task starts meanwhile as the sample's, but not as part of its code."""
    own = _place.get()
    before = _place.set(_Place(own.sample, own.tasks, outside_code=True))
    try:
        yield
    finally:
        _place.reset(before)


class Part:
    """A part of a sample's code that runs in other tasks, such as those of a server.

    Its calls are counted like those of a child task of the current one. Below that they are counted by names, so that
    their ids do not depend on their order.
    """

    def __init__(self) -> None:
        self._place = _place.get()
        self._path = f"{self._place.path}t{self._place.children}."
        self._place.children += 1
        self._named: dict[str, _Place] = {}

    @contextmanager
    def named(self, name: str) -> Iterator[str]:
        """Count the calls of the current task as the sample's meanwhile, one after the other for each name.

        Yields the id of the next call.
        """
        task = asyncio.current_task()
        assert task is not None
        own = self._place
        place = self._named.setdefault(name, _Place(own.sample, own.tasks, f"{self._path}{name}."))
        _samples[task] = own.sample
        own.tasks.add(task)
        before = _place.set(place)
        try:
            yield f"{place.path}{place.calls['']}"
        finally:
            _place.reset(before)
            own.tasks.discard(task)


def next_call(kind: str = "") -> str:
    """Return the id of the current task's next call. `kind`: letter of the kind of call.

    Raises RuntimeError within another call.
    """
    place = _place.get()
    if place.outside_code:
        raise RuntimeError(
            "a tool or a grader cannot call the context: a replay does not run it, but returns its recorded result"
        )
    place.calls[kind] += 1
    return f"{place.path}{kind}{place.calls[kind] - 1}"


def task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> "asyncio.Task[Any]":
    """Create a task of a loop; a task that a sample's code creates is numbered below the creating one."""
    parent = _place.get(None)
    if parent is None or parent.outside_code:
        task = asyncio.Task(coroutine, loop=loop, **options)
        if parent is not None:
            _samples[task] = parent.sample
        return task
    context = options.pop("context", None) or copy_context()
    context.run(_place.set, _Place(parent.sample, parent.tasks, f"{parent.path}t{parent.children}."))
    parent.children += 1
    task = asyncio.Task(coroutine, loop=loop, context=context, **options)
    _samples[task] = parent.sample
    parent.tasks.add(task)
    return task


_ROUNDS = 64
"""Maximum turns of the loop to wait for the code to become idle."""
_IDLE_TURNS = 3
"""Turns of the loop without a runnable task after which the code is idle: results within `asyncio.gather` take two."""


class SampleAborted(BaseException):
    """The sample is aborted, and may be resumed later. User code must not catch it."""


class EpisodeDiverged(BaseException):
    """The code behaves differently than when its calls were recorded. User code must not catch it."""


class UncertainEffect(BaseException):
    """A call with effects was in flight when its process was lost, and its outcome is unknown. User code must not catch
    it."""


_FATAL = (SampleAborted, EpisodeDiverged, UncertainEffect, ToolUnavailable)
"""Errors that end a sample."""


@dataclass
class _Answered:
    """A response that the code has not received yet."""

    record: CallRecord
    durable: bool
    future: "asyncio.Future[CallRecord]"


class Recorder:
    """The recorder of one sample. All methods run in the thread of its loop."""

    records = True
    """Whether responses of the policy are recorded for replay."""

    def __init__(
        self,
        recorded: Iterable[CallRecord],
        tasks: "Collection[asyncio.Task[Any]]",
        store: Callable[[CallRecord], None],
        store_durably: "Callable[[CallRecord], asyncio.Future[None]]",
        *,
        resampled: Collection[str] = (),
    ) -> None:
        """Create the recorder of a sample.

        Args:
            recorded: records of earlier attempts.
            tasks: tasks of the sample.
            store: stores a record of this attempt.
            store_durably: stores a record; its future is done when this record and all before it are durable.
            resampled: recorded calls of the policy that are made again.
        """
        self._tasks = tasks
        self._store, self._store_durably = store, store_durably
        self._resampled = resampled
        answers = [record for record in recorded if record.order is not None]
        self._known = {record.call: record for record in answers}
        self._intents = {record.call: record for record in recorded if record.order is None}
        in_order = sorted((one for one in answers if one.kind is not CallKind.NOW), key=lambda one: one.order or 0)
        self._pending = deque(in_order)
        """Recorded responses that the code has not received yet."""
        self._next = 1 + max((record.order for record in answers if record.order is not None), default=-1)
        self._requested: dict[str, tuple[CallRecord, asyncio.Future[CallRecord]]] = {}
        """Recorded calls that the code waits for, with their responses."""
        self._answered: deque[_Answered] = deque()
        self._acting = 0
        self._ended = False
        self.failure: BaseException | None = None
        """The error that ended the sample, even if its code caught it."""
        self._busy = False
        """Whether the code is processing a response, or one is being made durable."""

    @property
    def replaying(self) -> bool:
        """Whether recorded responses are still to be replayed."""
        return bool(self._pending)

    @property
    def acting(self) -> bool:
        """Whether a call with effects is in flight: cancelling it would leave its effect uncertain."""
        return self._acting > 0

    @property
    def awaited(self) -> CallRecord | None:
        """The recorded call that the code has to make next."""
        return next((record for record in self._pending if record.call not in self._requested), None)

    def has_response(self, call: str) -> bool:
        """Return whether an earlier attempt recorded the response to a call."""
        return call in self._known

    def value(self, record: CallRecord, make: Callable[[], str]) -> str:
        """Return the recorded value of a call that needs no waiting, such as the time, or a new one."""
        self._require_open()
        try:
            known = self._known_as(record)
        except EpisodeDiverged as error:
            self.failure = error
            raise
        if known is None:
            known = replace(record, result=make(), order=self._take_number())
            self._store(known)
        assert known.result is not None
        return known.result

    async def answer(
        self,
        record: CallRecord,
        do: Callable[[CallRecord], Awaitable[CallRecord]],
        *,
        repeat: bool = False,
        durable: bool = False,
    ) -> CallRecord:
        """Return the response to a call.

        Args:
            do: makes the call.
            repeat: make a recorded call again, too; its response must be the same.
            durable: return a new response only when it is durable.
        """
        self._require_open()
        try:
            return await self._answer(record, do, repeat=repeat, durable=durable)
        except _FATAL as error:
            self.failure = self.failure or error
            raise

    def end(self) -> None:
        """End the sample: tasks left running receive no responses and make no calls.

        The response of a call with effects in flight is still recorded.
        """
        self._ended = True
        for _, future in self._requested.values():
            future.cancel()

    async def _answer(
        self, record: CallRecord, do: Callable[[CallRecord], Awaitable[CallRecord]], *, repeat: bool, durable: bool
    ) -> CallRecord:
        known = self._known_as(record)
        future: asyncio.Future[CallRecord] = asyncio.get_running_loop().create_future()
        if known is None:
            self._acting += durable
            try:
                answered = await do(record)
            except BaseException:
                self._acting -= durable
                raise
            self._answered.append(_Answered(answered, durable, future))
        elif known.call in self._resampled:
            made = replace(await do(record), order=known.order)
            self._store(made)
            self._requested[known.call] = made, future
        else:
            if repeat:
                _require_same(known, await do(record))
            self._requested[known.call] = known, future
        if self._ended and known is not None:
            future.cancel()
        self._arrived()
        return await future

    def is_orphan(self, record: CallRecord) -> bool:
        """Return whether only the intent of this call is recorded."""
        intent = self._intents.get(record.call)
        if intent is not None:
            _require_same_call(intent, record)
        return intent is not None

    async def intend(self, record: CallRecord) -> None:
        """Wait until the intent to make a call is durable, with all responses that the code received before."""
        await self._store_durably(record)

    def _require_open(self) -> None:
        """Raise the error that ended the sample."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise asyncio.CancelledError("its sample has ended")

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _known_as(self, record: CallRecord) -> CallRecord | None:
        known = self._known.get(record.call)
        if known is not None:
            _require_same_call(known, record)
        return known

    def _arrived(self) -> None:
        """Handle an arrived response, new or recorded. In either case, let the code's other tasks run first."""
        if self._busy:
            return
        if self._side_by_side:
            self._busy = True
            self._wait_until_idle(_ROUNDS, 0)
        else:
            self._deliver_next()

    @property
    def _side_by_side(self) -> bool:
        """Whether several tasks of the sample are running."""
        return len(self._tasks) > 1 and sum(not task.done() for task in self._tasks) > 1

    def _deliver_next(self) -> None:
        """Deliver the next response, if it has arrived and the code has processed the one before."""
        if self._busy:
            return
        if self._pending and not self._ended:
            requested = self._requested.pop(self._pending[0].call, None)
            if requested is not None:
                self._busy = True
                self._pending.popleft()
                self._deliver(requested[1], requested[0])
            return
        while self._answered:
            next_ = self._answered.popleft()
            if self._ended:
                next_.future.cancel()
            if next_.future.done() and not next_.durable:  # it was cancelled: the code gets no response
                continue
            self._busy = True
            self._acting -= next_.durable
            record = replace(next_.record, order=self._take_number())
            if next_.durable:
                stored = self._store_durably(record)
                stored.add_done_callback(partial(self._deliver_durable, next_.future, record))
            else:
                self._store(record)
                self._deliver(next_.future, record)
            return

    def _deliver_durable(
        self, future: "asyncio.Future[CallRecord]", record: CallRecord, stored: "asyncio.Future[None]"
    ) -> None:
        if stored.cancelled():  # it will never become durable, so the code must not receive it
            future.cancel()
        self._deliver(future, record)

    def _deliver(self, future: "asyncio.Future[CallRecord]", record: CallRecord) -> None:
        if not future.done():
            future.set_result(record)
        if self._side_by_side:
            self._wait_until_idle(_ROUNDS, 0)
        else:  # the code makes its next call after it has processed this response
            self._busy = False
            if self._answered:
                asyncio.get_running_loop().call_soon(self._deliver_next)

    def _wait_until_idle(self, left: int, quiet: int) -> None:
        """Let the code run until it is idle."""
        quiet = quiet + 1 if self._is_quiet() else 0
        if quiet > _IDLE_TURNS or not left:
            self._busy = False
            self._deliver_next()
        else:
            asyncio.get_running_loop().call_soon(self._wait_until_idle, left - 1, quiet)

    def _is_quiet(self) -> bool:
        """Return whether each task waits for a future that is not done."""
        for task in list(self._tasks):
            if not task.done():
                waits_for = task._fut_waiter  # type: ignore[attr-defined]  # asyncio has no public attribute
                if waits_for is None or waits_for.done():
                    return False
        return True


class Unrecorded(Recorder):
    """The recorder of a built-in function, whose only calls are of the policy and which restarts where it was lost."""

    records = False

    def __init__(self) -> None:
        super().__init__((), (), _forget, _forget)


def _forget(record: CallRecord) -> Any:
    pass


def _require_same_call(known: CallRecord, record: CallRecord) -> None:
    if (known.kind, known.name, known.arguments_digest) != (record.kind, record.name, record.arguments_digest):
        raise EpisodeDiverged(
            f"the code makes {_of_policy(record)} where {_of_policy(known)} is recorded: it may depend only on results "
            "of its context"
        )


def _require_same(known: CallRecord, made: CallRecord) -> None:
    if (known.result, known.error) != (made.result, made.error):
        raise EpisodeDiverged(
            f"{known.description} is declared deterministic, but returned {_short(known)} first and {_short(made)} "
            "when repeated: set kind to effects"
        )


def _of_policy(record: CallRecord) -> str:
    return (
        f"{record.description} after {record.given} other tokens"
        if record.kind is CallKind.SAMPLE
        else record.description
    )


def _short(record: CallRecord) -> str:
    text = record.result if record.error is None else f"the error {record.error}"
    assert text is not None
    return text if len(text) <= 200 else f"{text[:200]}…"
