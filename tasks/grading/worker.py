"""What runs in a grader process: one call of the grader after the other, or of a coroutine function several side by
side, until the pool closes the connection or dies.

Messages, pickled: the pool sends a list of calls, each a list of samples. The process answers each with its position in
the list and, for each of its samples, (reward, components, error, whose doing the error is); and with None once, when
it is ready for the first. It begins calls in their order and answers them as they end.

A call of a coroutine function that takes too long is cancelled here, and the others go on. What it may take is counted
by looks at the clock: a pause of the machine is no more than two of them.
"""

import asyncio
import errno
import json
import math
import os
import struct
import sys
import time
import traceback
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from inspect import isawaitable
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.plugins import load_callable
from cairn.engines.processes.child import die_with
from cairn.storage.store.canonical import from_json
from cairn.tasks.rewards.boxed import in_box
from cairn.tasks.rewards.grader import Grader, Takes, TryAgain


class Whose(StrEnum):
    """Whose doing it is that a grader raised."""

    SAMPLE = "sample"
    """The grader's, over this sample."""
    SERVICE = "service"
    """Of something that the grader asked: it may pass."""
    MACHINE = "machine"
    """The machine had no memory, disk, files or processes left."""
    NOBODY = "nobody"
    """It did not answer in its time, having waited beside others."""


Answer = tuple[float | None, dict[str, Any] | None, str | None, Whose]

_LOOK = 0.25
"""Seconds between two looks at the clock."""
_TO_END = 1.0
"""Seconds that a call which is cancelled may take to end."""
_BUSY = (408, 429)
_NOTHING_LEFT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


@dataclass(frozen=True)
class Terms:
    """How a process grades."""

    takes: Takes
    waits: bool
    """The grader is a coroutine function."""
    timeout: float
    """Seconds that one may take over a sample."""
    concurrency: int
    """Calls of one at a time."""
    memory: int | None
    """Bytes of data that the process may hold."""
    transient: tuple[str, ...] = ()
    """As in `RetryConfig`."""
    reward_key: str = "reward"
    """The entry of a mapping that is the reward."""
    boxed: bool = False
    """The grader is given what stands in the last box in the place of the response."""

    @property
    def at_once(self) -> int:
        """Calls that are under way at a time."""
        return self.concurrency if self.waits else 1


def main(connection_fd: int, parent: int, path: str, terms: Sequence[Any]) -> None:
    """Grade with the callable that `path` names, for the process `parent`, over an inherited connection. `terms`: the
    fields of `Terms`."""
    die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    given = Terms(Takes(terms[0]), *terms[1:])
    if given.memory is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (given.memory, given.memory))
    grader: Grader = load_callable(path)
    # The pool may be gone, perhaps before it had read the last answer. What a coroutine leaves open, such as the client
    # of a service, stays open from one message to the next.
    with suppress(EOFError, ConnectionError), asyncio.Runner() as runner:
        connection.send(None)
        while True:
            calls: list[list[Any]] = connection.recv()
            if given.waits:
                runner.run(_side_by_side(connection, grader, calls, given))
                continue
            for position, samples in enumerate(calls):
                connection.send((position, answers(grader, samples, given, runner)))


def answers(grader: Grader, samples: Sequence[Any], terms: Terms, runner: asyncio.Runner) -> list[Answer]:
    """One call: the reward and components of each sample, or the error that it ended in. What a plain function returns
    to be awaited is awaited."""
    # A grader is user code: whatever it raises is the result of these samples, and no other is to suffer from it.
    try:
        result = grader(*_arguments(samples, terms))
        if isawaitable(result):
            result = runner.run(_result(result))
        return _told(result, samples, terms, alone=True)
    except (Exception, SystemExit) as error:
        return [_failed(error, terms, alone=True)] * len(samples)


async def _result(result: Awaitable[Any]) -> Any:
    return await result


async def _side_by_side(connection: Connection, grader: Grader, calls: Sequence[list[Any]], terms: Terms) -> None:
    """All calls, so many at a time, each answered when it ends."""
    left = iter(enumerate(calls))

    async def one_after_the_other() -> None:
        for position, samples in left:
            connection.send((position, await _awaited(grader, samples, terms, alone=len(calls) == 1)))

    await asyncio.gather(*(one_after_the_other() for _ in range(min(terms.concurrency, len(calls)))))


async def _awaited(grader: Grader, samples: Sequence[Any], terms: Terms, alone: bool) -> list[Answer]:
    """One call of a coroutine function; cancelled when its time is over."""

    async def call() -> list[Answer]:
        try:
            result = await grader(*_arguments(samples, terms))
            return _told(result, samples, terms, alone)
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            return [_failed(error, terms, alone)] * len(samples)

    task = asyncio.create_task(call())
    left = terms.timeout * len(samples)
    look = min(_LOOK, left / 8)
    while left > 0:
        began = time.monotonic()
        if (await asyncio.wait([task], timeout=look))[0]:
            return task.result()
        left -= min(time.monotonic() - began, 2 * look)
    task.cancel()
    await asyncio.wait([task], timeout=_TO_END)
    return [(None, None, too_long(terms.timeout * len(samples)), Whose.NOBODY)] * len(samples)


def too_long(seconds: float) -> str:
    """What is said of a call that took more than these."""
    return f"the grader took longer than {seconds:g} s"


def _arguments(samples: Sequence[Any], terms: Terms) -> Sequence[Any]:
    """What the grader is called with. A sample of one that takes texts is its three arguments."""
    if terms.takes in (Takes.SLIME_SAMPLE, Takes.SLIME_SAMPLES):
        from cairn.tasks import slime  # no other grader has need of it

        args, given = slime.Arguments({"reward.reward_key": terms.reward_key}), list(map(slime.to_grade, samples))
        return [args, given if terms.takes.several else given[0]]
    if terms.boxed:
        samples = [in_box(sample) for sample in samples]
    if terms.takes is Takes.SAMPLES:
        return [list(samples)]
    (sample,) = samples
    return sample if terms.takes is Takes.TEXTS else [sample]


def _told(result: Any, samples: Sequence[Any], terms: Terms, alone: bool) -> list[Answer]:
    """What a call returned, by sample. Raises what makes it no result."""
    if not terms.takes.several:
        return [_reward(result, terms)]
    found = list(result)
    if len(found) != len(samples):
        raise ValueError(f"the grader returned {len(found)} rewards for {len(samples)} samples: let it return one each")
    return list(_each(found, terms, alone))


def _each(results: Sequence[Any], terms: Terms, alone: bool) -> Iterator[Answer]:
    for result in results:
        try:
            if isinstance(result, Exception):
                raise result
            yield _reward(result, terms)
        except Exception as error:
            yield _failed(error, terms, alone)


def _reward(result: Any, terms: Terms) -> Answer:
    """Of one sample. Raises what makes it none."""
    if not isinstance(result, Mapping):
        return finite(result), None, None, Whose.SAMPLE
    if terms.reward_key not in result:
        has = ", ".join(sorted(map(repr, result))) or "nothing"
        raise ValueError(f"the grader's mapping lacks {terms.reward_key!r}, it has {has}: set reward.reward_key")
    components = {str(name): _component(value) for name, value in result.items() if name != terms.reward_key}
    return finite(result[terms.reward_key]), components or None, None, Whose.SAMPLE


def _component(value: Any) -> Any:
    """What is recorded of a component: the numbers of arrays; nothing of what is not finite; as text, of what is no
    JSON, or nested so deeply that no reader takes it."""
    try:
        text = json.dumps(value, default=lambda array: array.tolist())
        from_json(f'{{"component": {text}}}')
        return json.loads(text, parse_constant=lambda name: None)
    except (TypeError, ValueError, AttributeError, RecursionError):
        return repr(value)[:1000].encode(errors="backslashreplace").decode()


def _failed(error: BaseException, terms: Terms, alone: bool) -> Answer:
    """What an error says of one sample. `alone`: nothing else of this process was under way, so that a lack of memory
    that was limited is its own doing."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    told = f"{type(error).__name__}: {error}{place}"
    told = told.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text that can be stored
    return None, None, told, whose(error, terms.transient, terms.memory is not None and alone)


def whose(error: BaseException, transient: Sequence[str], limited: bool) -> Whose:
    """Whose doing an error is. A service's are those of a class that `transient` names, and those that carry an HTTP
    status that does not last; of several at once the machine's counts, and the service's if all are."""
    if isinstance(error, ExceptionGroup):
        parts = {whose(part, transient, limited) for part in error.exceptions}
        return Whose.MACHINE if Whose.MACHINE in parts else Whose.SERVICE if parts == {Whose.SERVICE} else Whose.SAMPLE
    out_of_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
    if out_of_memory:
        return Whose.SAMPLE if limited else Whose.MACHINE
    if isinstance(error, OSError) and error.errno in _NOTHING_LEFT:
        return Whose.MACHINE
    names = {name for kind in type(error).__mro__ for name in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")}
    if isinstance(error, TryAgain) or not names.isdisjoint(transient):
        return Whose.SERVICE
    holders = (error, getattr(error, "response", None))
    # requests, httpx and openai; aiohttp; urllib.
    statuses = [getattr(holder, name, None) for holder in holders for name in ("status_code", "status", "code")]
    lasts = not any(isinstance(status, int) and (status in _BUSY or 500 <= status < 600) for status in statuses)
    return Whose.SAMPLE if lasts else Whose.SERVICE


def finite(value: Any) -> float:
    """A reward. Raises ValueError and TypeError for what is none."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the grader returned {value!r}, which is no reward")
    try:
        struct.pack("<f", reward)
    except OverflowError:
        raise ValueError(f"the grader returned {value!r}, which is no reward: float32 ends at 3.4e38") from None
    return reward
