"""What runs in a grader process: one sample after the other, until the pool closes the connection or dies.

Messages, pickled: the pool sends a list of samples; the process answers each in order with (reward, components, error,
whose doing the error is), and with None once, when it is ready for the first.
"""

import ctypes
import errno
import json
import math
import os
import signal
import struct
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.plugins import load_callable
from cairn.tasks.rewards import Grader, TryAgain


class Whose(StrEnum):
    """Whose doing it is that a grader raised."""

    SAMPLE = "sample"
    """The grader's, over this sample."""
    SERVICE = "service"
    """Of something that the grader asked: it may pass."""
    MACHINE = "machine"
    """The machine had no memory, disk, files or processes left."""


Answer = tuple[float | None, dict[str, Any] | None, str | None, Whose]

_PR_SET_PDEATHSIG = 1
_BUSY = (408, 429)
_NOTHING_LEFT = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN})


def main(
    connection_fd: int, parent: int, path: str, whole_sample: bool, memory: int | None, transient: Sequence[str]
) -> None:
    """Grade with the callable that `path` names, for the process `parent`, over an inherited connection."""
    _die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    if memory is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    grader: Grader = load_callable(path)
    with suppress(EOFError, ConnectionError):  # the pool is gone, perhaps before it had read the last answer
        connection.send(None)
        while True:
            for sample in connection.recv():
                connection.send(answer(grader, (sample,) if whole_sample else sample, transient, memory is not None))


def answer(grader: Grader, arguments: Sequence[Any], transient: Sequence[str] = (), limited: bool = False) -> Answer:
    """One sample: its reward and components, or the error that the grader ended in. `limited`: what memory it may have
    was said, so that a lack of it is the sample's doing."""
    # A grader is user code: whatever it raises is the result of this sample, and no other is to suffer from it.
    try:
        result = grader(*arguments)
        if not isinstance(result, Mapping):
            return _finite(result), None, None, Whose.SAMPLE
        components = {str(name): value for name, value in result.items() if name != "reward"}
        json.dumps(components, allow_nan=False)
        return _finite(result["reward"]), components or None, None, Whose.SAMPLE
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"
        told = told.encode(errors="backslashreplace").decode()  # half a surrogate pair is no text that can be stored
        return None, None, told, whose(error, transient, limited)


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


def _finite(value: Any) -> float:
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the grader returned {value!r}, which is no reward")
    try:
        struct.pack("<f", reward)
    except OverflowError:
        raise ValueError(f"the grader returned {value!r}, which is no reward: float32 ends at 3.4e38") from None
    return reward


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if a grader is busy and whatever way it ends.

    Elsewhere than on Linux the process ends when it next looks for work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
