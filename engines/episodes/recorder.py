r"""Record and replay of a sample's calls.

Answers reach the code one at a time, each when the code has done all that it could with those before: so what it does
depends on their order alone, which is recorded. Where the code runs again it is given what is recorded in that order,
each answer when it has asked for it, and then goes on with new ones. `asyncio.gather`, queues and tasks of its own are
right; what it waits for past its context, a clock or a socket, is not recorded.

| the code asks | recorded is | it is given |
|---|---|---|
| what it has asked before | the answer | that answer; a `deterministic` tool is asked again, and has to say it too |
| the same by another name, or with other arguments | | EpisodeDiverged |
| what it has not asked before | nothing | a new answer, after all that is recorded |
| for an effect | the intent alone | what `reconcile` finds, or the effect again under its key, or UncertainEffect |

What ends the sample, such as the last two, ends it whatever its code makes of it: `asyncio.gather` may be told to
return errors as values. A call that is broken off has no answer, but for one with effects, which is recorded where it
has come. What the code left running when it ended makes no calls any more.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from cairn.engines.episodes.records import CallKind, CallRecord
from cairn.engines.tools.errors import ToolUnavailable

_ROUNDS = 64
"""Turns of the loop after which code that never waits is not waited for."""
_QUIET = 3
"""Turns of the loop without a task that could go on, after which none will by itself: what is done within
`asyncio.gather` takes two to come through."""


class SampleAborted(BaseException):
    """The sample is given up: it may be continued later. No error of user code, which is not to catch it."""


class EpisodeDiverged(BaseException):
    """The code does something else than it did when its calls were recorded. Not for user code to catch."""


class UncertainEffect(BaseException):
    """A call with effects was under way when its process was lost, and nobody can say whether it was done. Not for user
    code to catch."""


_ENDS = (SampleAborted, EpisodeDiverged, UncertainEffect, ToolUnavailable)
"""What ends a sample."""


@dataclass
class _Answered:
    """An answer on its way to the code."""

    record: CallRecord
    durable: bool
    future: "asyncio.Future[CallRecord]"


class Recorder:
    """Of one sample. All of it is for the thread of its loop."""

    records = True
    """Whether the answers of the policy are kept, to be given again."""

    def __init__(
        self,
        recorded: Iterable[CallRecord],
        tasks: "Collection[asyncio.Task[Any]]",
        say: Callable[[CallRecord], None],
        say_durably: "Callable[[CallRecord], asyncio.Future[None]]",
        *,
        resampled: Collection[str] = (),
    ) -> None:
        """`recorded`: by earlier attempts; `resampled`: calls of the policy among it that are made again. `tasks`: of
        the sample. `say` takes a record of this attempt, `say_durably` one whose future is done when it and all before
        it are durable."""
        self._tasks = tasks
        self._say, self._say_durably = say, say_durably
        self._resampled = resampled
        answers = [record for record in recorded if record.order is not None]
        self._known = {record.call: record for record in answers}
        self._intents = {record.call: record for record in recorded if record.order is None}
        in_order = sorted((one for one in answers if one.kind is not CallKind.NOW), key=lambda one: one.order or 0)
        self._pending = deque(in_order)
        """Recorded answers that the code has not been given yet."""
        self._next = 1 + max((record.order for record in answers if record.order is not None), default=-1)
        self._asked: dict[str, tuple[CallRecord, asyncio.Future[CallRecord]]] = {}
        """Recorded calls that the code has made, and waits for, with what it is given."""
        self._answered: deque[_Answered] = deque()
        self._acting = 0
        self._ended = False
        self.failure: BaseException | None = None
        """What ended the sample, whether its code has minded or not."""
        self._busy = False
        """Whether the code is at work on an answer, or one is being made durable."""

    @property
    def replaying(self) -> bool:
        """Whether something recorded is still to be given."""
        return bool(self._pending)

    @property
    def acting(self) -> bool:
        """Whether a call with effects is under way: breaking it off would leave its effect uncertain."""
        return self._acting > 0

    @property
    def awaited(self) -> CallRecord | None:
        """The recorded call that the code would have to make next."""
        return next((record for record in self._pending if record.call not in self._asked), None)

    def knows(self, call: str) -> bool:
        """Whether the answer to a call is recorded by an earlier attempt."""
        return call in self._known

    def value(self, record: CallRecord, make: Callable[[], str]) -> str:
        """What is had at once, such as the time."""
        self._require_open()
        try:
            known = self._known_as(record)
        except EpisodeDiverged as error:
            self.failure = error
            raise
        if known is None:
            known = replace(record, result=make(), order=self._take_number())
            self._say(known)
        assert known.result is not None
        return known.result

    async def answer(
        self,
        asked: CallRecord,
        do: Callable[[CallRecord], Awaitable[CallRecord]],
        *,
        again: bool = False,
        durable: bool = False,
    ) -> CallRecord:
        """The answer to a call. `do` gets a new one. `again`: a recorded one is got again too, and must be the same.
        `durable`: the code is given a new one when it is durable."""
        self._require_open()
        try:
            return await self._answer(asked, do, again=again, durable=durable)
        except _ENDS as error:
            self.failure = self.failure or error
            raise

    def end(self) -> None:
        """The sample has ended. What its code left running is given no answer any more, and makes no call; that of an
        effect under way is still recorded."""
        self._ended = True
        for _, future in self._asked.values():
            future.cancel()

    async def _answer(
        self, asked: CallRecord, do: Callable[[CallRecord], Awaitable[CallRecord]], *, again: bool, durable: bool
    ) -> CallRecord:
        known = self._known_as(asked)
        future: asyncio.Future[CallRecord] = asyncio.get_running_loop().create_future()
        if known is None:
            self._acting += durable
            try:
                answered = await do(asked)
            except BaseException:
                self._acting -= durable
                raise
            self._answered.append(_Answered(answered, durable, future))
        elif known.call in self._resampled:
            made = replace(await do(asked), order=known.order)
            self._say(made)
            self._asked[known.call] = made, future
        else:
            if again:
                _require_same(known, await do(asked))
            self._asked[known.call] = known, future
        if self._ended and known is not None:
            future.cancel()
        self._arrived()
        return await future

    def is_orphan(self, asked: CallRecord) -> bool:
        """Whether the intent to make this call is all that is recorded of it."""
        found = self._intents.get(asked.call)
        if found is not None:
            _require_same_call(found, asked)
        return found is not None

    async def intend(self, asked: CallRecord) -> None:
        """Return when the intent to make a call is durable, with all that the code was given before."""
        await self._say_durably(asked)

    def _require_open(self) -> None:
        """Raise what ended the sample."""
        if self.failure is not None:
            raise self.failure
        if self._ended:
            raise asyncio.CancelledError("its sample has ended")

    def _take_number(self) -> int:
        self._next += 1
        return self._next - 1

    def _known_as(self, asked: CallRecord) -> CallRecord | None:
        known = self._known.get(asked.call)
        if known is not None:
            _require_same_call(known, asked)
        return known

    def _arrived(self) -> None:
        """An answer is there, now or as it was recorded: what the code has begun besides comes first in either case."""
        if self._busy:
            return
        if self._side_by_side:
            self._busy = True
            self._settle(_ROUNDS, 0)
        else:
            self._go_on()

    @property
    def _side_by_side(self) -> bool:
        """Whether the code is at several things."""
        return len(self._tasks) > 1 and sum(not task.done() for task in self._tasks) > 1

    def _go_on(self) -> None:
        """Give the code its next answer, if that is there and the code has done with the one before."""
        if self._busy:
            return
        if self._pending and not self._ended:
            asked = self._asked.pop(self._pending[0].call, None)
            if asked is not None:
                self._busy = True
                self._pending.popleft()
                self._give(asked[1], asked[0])
            return
        while self._answered:
            next_ = self._answered.popleft()
            if self._ended:
                next_.future.cancel()
            if next_.future.done() and not next_.durable:  # it was cancelled: the code knows of no answer
                continue
            self._busy = True
            self._acting -= next_.durable
            record = replace(next_.record, order=self._take_number())
            if next_.durable:
                told = self._say_durably(record)
                told.add_done_callback(partial(self._give_durable, next_.future, record))
            else:
                self._say(record)
                self._give(next_.future, record)
            return

    def _give_durable(
        self, future: "asyncio.Future[CallRecord]", record: CallRecord, told: "asyncio.Future[None]"
    ) -> None:
        if told.cancelled():  # it never becomes durable: the code is not to go on with it
            future.cancel()
        self._give(future, record)

    def _give(self, future: "asyncio.Future[CallRecord]", record: CallRecord) -> None:
        if not future.done():
            future.set_result(record)
        if self._side_by_side:
            self._settle(_ROUNDS, 0)
        else:  # whatever comes next, the code asks for when it has done with this one
            self._busy = False
            if self._answered:
                asyncio.get_running_loop().call_soon(self._go_on)

    def _settle(self, left: int, quiet: int) -> None:
        """Let the code do all that it can."""
        quiet = quiet + 1 if self._is_quiet() else 0
        if quiet > _QUIET or not left:
            self._busy = False
            self._go_on()
        else:
            asyncio.get_running_loop().call_soon(self._settle, left - 1, quiet)

    def _is_quiet(self) -> bool:
        """Whether each task waits for something that has not come."""
        for task in list(self._tasks):
            if not task.done():
                waits_for = task._fut_waiter  # type: ignore[attr-defined]  # asyncio tells it nowhere else
                if waits_for is None or waits_for.done():
                    return False
        return True


class Unrecorded(Recorder):
    """Of a sample of ours, whose code asks the policy and nobody else, and runs anew where it was lost."""

    records = False

    def __init__(self) -> None:
        super().__init__((), (), _forget, _forget)


def _forget(record: CallRecord) -> Any:
    pass


def _require_same_call(known: CallRecord, asked: CallRecord) -> None:
    if (known.kind, known.name, known.arguments_digest) != (asked.kind, asked.name, asked.arguments_digest):
        raise EpisodeDiverged(
            f"the code asks for {_of_policy(asked)} where {_of_policy(known)} is recorded: what it does has to follow "
            "from what its context gives it"
        )


def _require_same(known: CallRecord, made: CallRecord) -> None:
    if (known.result, known.error) != (made.result, made.error):
        raise EpisodeDiverged(
            f"{known.told} is declared deterministic; it was answered with {_short(known)} and, made again, with "
            f"{_short(made)}: declare it to have effects"
        )


def _of_policy(record: CallRecord) -> str:
    return f"{record.told} after {record.given} other tokens" if record.kind is CallKind.SAMPLE else record.told


def _short(record: CallRecord) -> str:
    told = record.result if record.error is None else f"the error {record.error}"
    assert told is not None
    return told if len(told) <= 200 else f"{told[:200]}…"
