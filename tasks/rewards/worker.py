"""What runs in a grader process: one sample after the other, until the pool closes the connection or dies.

Messages, pickled: the pool sends a list of (response, label, metadata); the process answers each sample in order with
(reward, components, error), and with None once, when it is ready for the first.
"""

import ctypes
import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from tasks.plugins import load_callable
from tasks.rewards import Grader

Answer = tuple[float | None, dict[str, Any] | None, str | None]

_PR_SET_PDEATHSIG = 1


def main(connection_fd: int, parent: int, path: str) -> None:
    """Grade with the callable that `path` names, for the process `parent`, over an inherited connection."""
    _die_with(parent)
    os.set_inheritable(connection_fd, False)
    connection = Connection(connection_fd)
    grader: Grader = load_callable(path)
    connection.send(None)
    while True:
        try:
            samples = connection.recv()
        except EOFError:
            return
        for sample in samples:
            connection.send(grade(grader, *sample))


def grade(grader: Grader, response: str, label: str | None, metadata: dict[str, Any]) -> Answer:
    """One sample: its reward and components, or the error that the grader ended in."""
    # A grader is user code: whatever it raises is the result of this sample, and no other is to suffer from it.
    try:
        result = grader(response, label, metadata)
        if not isinstance(result, Mapping):
            return _finite(result), None, None
        components = {str(name): value for name, value in result.items() if name != "reward"}
        json.dumps(components, allow_nan=False)
        return _finite(result["reward"]), components or None, None
    except (Exception, SystemExit) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return None, None, f"{type(error).__name__}: {error} ({os.path.basename(place.filename)}:{place.lineno})"


def _finite(value: Any) -> float:
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"the grader returned {value!r}, which is no reward")
    return reward


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even if a grader is busy and whatever way it ends.

    Elsewhere than on Linux the process ends when it next looks for work.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
