"""A process beside a driver that waits, stops itself, or answers."""

import os
import signal
import time
from typing import Any

from cairn.tasks.durable.beside import Question, serve


def main(connection: int, parent: int, interval: float) -> None:
    serve(connection, parent, _run, interval)


def _run(request: Any, ask: Question) -> Any:
    if request == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(3600)  # this thread may run on for a moment
    elif isinstance(request, float):
        time.sleep(request)
    return os.getpid(), request
