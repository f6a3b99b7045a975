"""The main program of a grader process. It calls the grader until the pool closes the connection or dies.

Messages are pickled. The pool sends a list of calls, each a list of samples. The process replies to each call with its
position in the list and, for each of its samples, (reward, components, error, cause of the error). It sends None once,
when it is ready for the first message. It begins calls in order and replies as they end.

Calls of a plain function run one after the other, those of a coroutine function concurrently. A coroutine call that
takes too long is cancelled here, and the others continue. Its time is counted by looks at the clock: a pause of the
machine counts as two of them at most.
"""

import asyncio
import errno
import json
import math
import os
import struct
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from inspect import isawaitable, isclass
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.kinds import REWARD
from cairn.configs.plugins import load_callable
from cairn.engines.processes.child import die_with
from cairn.engines.types.places import with_place
from cairn.storage.store.canonical import from_json
from cairn.tasks.rewards.boxed import in_box
from cairn.tasks.rewards.grader import Grader, Takes, TryAgain, constructor_arguments


class ErrorCause(StrEnum):
    """Cause of an error that a grader raised."""

    SAMPLE = "sample"
    """The grader, over this sample."""
    SERVICE = "service"
    """Something that the grader called; the error may pass."""
    MACHINE = "machine"
    """The machine had no memory, disk, files or processes left."""
    UNKNOWN = "unknown"
    """Unknown: the call timed out while it ran next to others."""


Answer = tuple[float | None, dict[str, Any] | None, str | None, ErrorCause]

_POLL_INTERVAL = 0.25
"""Seconds between two looks at the clock."""
_TO_END = 1.0
"""Seconds that a cancelled call may take to end."""
_BUSY = (408, 429)
_NOTHING_LEFT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


@dataclass(frozen=True)
class Terms:
    """Settings of a grader process."""

    takes: Takes
    waits: bool
    """Whether the grader is a coroutine function."""
    timeout: float
    """Seconds that a grader may take over a sample."""
    concurrency: int
    """Concurrent calls of a coroutine function."""
    memory: int | None
    """Bytes of data that the process may hold; None: no limit."""
    transient: tuple[str, ...] = ()
    """Names of error classes that a retry may mend: `errors` of `GraderRetries`."""
    reward_key: str = "reward"
    """Entry of a mapping that is the reward."""
    boxed: bool = False
    """Whether the grader gets the content of the last box in place of the response."""
    args: dict[str, Any] = field(default_factory=dict)
    """Values of slime's `args`: `NamedGrader.args`."""

    @property
    def at_once(self) -> int:
        """Number of calls in flight at a time."""
        return self.concurrency if self.waits else 1


def main(connection_fd: int, parent: int, path: str, terms: Sequence[Any]) -> None:
    """Grade with the callable that `path` names, for the process `parent`, over an inherited connection.

    `terms` are the fields of `Terms`.
    """
    die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    settings = Terms(Takes(terms[0]), *terms[1:])
    if settings.memory is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (settings.memory, settings.memory))
    grader: Grader = load_callable(path)
    if isclass(grader):
        grader = getattr(grader(**constructor_arguments(path, grader, settings.args)), REWARD.method)
    # The pool may be gone, perhaps before it had read the last answer. One event loop serves all messages, so that what
    # a coroutine leaves open, such as the client of a service, stays open between them.
    with suppress(EOFError, ConnectionError), asyncio.Runner() as runner:
        connection.send(None)
        while True:
            calls: list[list[Any]] = connection.recv()
            if settings.waits:
                runner.run(_side_by_side(connection, grader, calls, settings))
                continue
            for position, samples in enumerate(calls):
                connection.send((position, answers(grader, samples, settings, runner)))


def answers(grader: Grader, samples: Sequence[Any], terms: Terms, runner: asyncio.Runner) -> list[Answer]:
    """Make one call, and return the reward and components of each sample, or the error of the call.

    If a plain function returns an awaitable, it is awaited.
    """
    # A grader is user code: any error that it raises is the result of these samples, and must not affect others.
    try:
        result = grader(*_arguments(samples, terms))
        if isawaitable(result):
            result = runner.run(_result(result))
        return _answers_of_result(grader, result, samples, terms, alone=True)
    except (Exception, SystemExit) as error:
        return [_failed(grader, error, terms, alone=True)] * len(samples)


async def _result(result: Awaitable[Any]) -> Any:
    return await result


async def _side_by_side(connection: Connection, grader: Grader, calls: Sequence[list[Any]], terms: Terms) -> None:
    """Make all calls, `terms.concurrency` at a time, and reply to each when it ends."""
    left = iter(enumerate(calls))

    async def one_after_the_other() -> None:
        for position, samples in left:
            connection.send((position, await _awaited(grader, samples, terms, alone=len(calls) == 1)))

    await asyncio.gather(*(one_after_the_other() for _ in range(min(terms.concurrency, len(calls)))))


async def _awaited(grader: Grader, samples: Sequence[Any], terms: Terms, alone: bool) -> list[Answer]:
    """Make one call of a coroutine function; cancel it when its time is over."""

    async def call() -> list[Answer]:
        try:
            result = await grader(*_arguments(samples, terms))
            return _answers_of_result(grader, result, samples, terms, alone)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return [_failed(grader, error, terms, alone)] * len(samples)

    task = asyncio.create_task(call())
    left = terms.timeout * len(samples)
    look = min(_POLL_INTERVAL, left / 8)
    while left > 0:
        began = time.monotonic()
        if (await asyncio.wait([task], timeout=look))[0]:
            return task.result()
        left -= min(time.monotonic() - began, 2 * look)
    task.cancel()
    await asyncio.wait([task], timeout=_TO_END)
    return [(None, None, timeout_message(terms.timeout * len(samples)), ErrorCause.UNKNOWN)] * len(samples)


def timeout_message(seconds: float) -> str:
    """Return the message for a call that took more than `seconds`."""
    return f"the grader took longer than {seconds:g} s"


def _arguments(samples: Sequence[Any], terms: Terms) -> Sequence[Any]:
    """Return the arguments of the grader. For a grader of texts a sample is a tuple of its arguments."""
    if terms.takes.of_slime:
        from cairn.tasks import slime  # no other grader needs it

        args, own = slime.Arguments(terms.args), list(map(slime.to_grade, samples))
        return [args, own if terms.takes.several else own[0]]
    if terms.takes is Takes.PROMPTS:
        return [[sample.prompt for sample in samples], [sample.response for sample in samples]]
    if terms.boxed:
        samples = [in_box(sample) for sample in samples]
    if terms.takes is Takes.SAMPLES:
        return [list(samples)]
    (sample,) = samples
    return sample if terms.takes in (Takes.TEXTS, Takes.VERL, Takes.SOLUTION) else [sample]


def _answers_of_result(grader: Grader, result: Any, samples: Sequence[Any], terms: Terms, alone: bool) -> list[Answer]:
    """Return the answers of a call, one a sample. Raises an error where the result is not valid."""
    if not terms.takes.several:
        return [_reward(result, terms)]
    results = list(result)
    if len(results) != len(samples):
        raise ValueError(
            f"the grader returned {len(results)} rewards for {len(samples)} samples: let it return one for each"
        )
    return list(_each(grader, results, terms, alone))


def _each(grader: Grader, results: Sequence[Any], terms: Terms, alone: bool) -> Iterator[Answer]:
    for result in results:
        try:
            if isinstance(result, Exception):
                raise result
            yield _reward(result, terms)
        except Exception as error:
            yield _failed(grader, error, terms, alone)


def _reward(result: Any, terms: Terms) -> Answer:
    """Return the answer for one sample. Raises an error where the result is no reward."""
    if not isinstance(result, Mapping):
        return finite(result), None, None, ErrorCause.SAMPLE
    if terms.reward_key not in result:
        has = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ValueError(f"the grader's mapping lacks {terms.reward_key!r}, it has {has}: set reward.reward_key")
    components = {str(name): _component(value) for name, value in result.items() if name != terms.reward_key}
    return finite(result[terms.reward_key]), components or None, None, ErrorCause.SAMPLE


def _component(value: Any) -> Any:
    """Return a component as it is recorded.

    Arrays become lists, and numbers that are not finite become None. A value becomes text if it is no JSON, or is
    nested too deeply to be read again.
    """
    try:
        text = json.dumps(value, default=lambda array: array.tolist())
        from_json(f'{{"component": {text}}}')
        return json.loads(text, parse_constant=lambda name: None)
    except (TypeError, ValueError, AttributeError, RecursionError):
        return repr(value)[:1000].encode(errors="backslashreplace").decode()


def _failed(grader: Grader, error: BaseException, terms: Terms, alone: bool) -> Answer:
    """Return the answer for a sample that ended in an error.

    Args:
        alone: nothing else of this process was in flight, so that the sample itself used up limited memory.
    """
    message = with_place(f"{type(error).__name__}: {error}", error, grader)
    message = message.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text that can be stored
    return None, None, message, cause_of_error(error, terms.transient, terms.memory is not None and alone)


def cause_of_error(error: BaseException, transient: Sequence[str], limited: bool) -> ErrorCause:
    """Return the cause of an error.

    A service causes the errors of the classes that `transient` names, and those with an HTTP status that does not last.
    The machine causes an ExceptionGroup if it caused one of its errors, a service if it caused all.

    Args:
        limited: the sample's memory was limited, so that it caused a lack of memory itself.
    """
    if isinstance(error, ExceptionGroup):
        parts = {cause_of_error(part, transient, limited) for part in error.exceptions}
        return (
            ErrorCause.MACHINE
            if ErrorCause.MACHINE in parts
            else ErrorCause.SERVICE
            if parts == {ErrorCause.SERVICE}
            else ErrorCause.SAMPLE
        )
    out_of_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if out_of_memory:
        return ErrorCause.SAMPLE if limited else ErrorCause.MACHINE
    if isinstance(error, OSError) and error.errno in _NOTHING_LEFT:
        return ErrorCause.MACHINE
    names = {name for kind in type(error).__mro__ for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")}
    if isinstance(error, TryAgain) or not names.isdisjoint(transient):
        return ErrorCause.SERVICE
    holders = (error, getattr(error, "response", None))
    # `status_code`: requests, httpx and openai; `status`: aiohttp; `code`: urllib.
    statuses = [getattr(holder, name, None) for holder in holders for name in ("status_code", "status", "code")]
    lasts = not any(isinstance(status, int) and (status in _BUSY or 500 <= status < 600) for status in statuses)
    return ErrorCause.SAMPLE if lasts else ErrorCause.SERVICE


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def finite(value: Any) -> float:
    """Return a value as a reward. Raises ValueError or TypeError where it is no finite float32."""
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError):
        raise TypeError(
            f"the grader returned {_shown(value)}, a {type(value).__name__}, which is not a reward"
        ) from None
    if not math.isfinite(reward):
        raise ValueError(f"the grader returned {value!r}, which is not a reward")
    try:
        struct.pack("<f", reward)
    except OverflowError:
        raise ValueError(
            f"the grader returned {value!r}, which is not a reward: the maximum of float32 is 3.4e38"
        ) from None
    return reward
