"""How long a sample has kept its grader busy, told apart from how long the machine kept the grader waiting.

| what the grader's processes do | counts as their own time |
|---|---|
| compute | the CPU time they use |
| sleep, or wait for a lock, a socket or an answer: no thread of theirs wants to run | the time it lasts |
| want to run and are not let, wait for a disk, are stopped, or the whole machine is | nothing |

Own time is what a limit can be held to: it is the same on an idle machine and on one that is busy, was paused, or
swaps. The wall clock is not, and it is used for one thing only: to give up a process that gets nowhere.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

_AT_REST = frozenset("SIZX")  # sleeping, idle kernel thread, ended
_STOPPED = frozenset("Tt")


class OwnTime:
    """Of a process and those that it started, from when this was made. Ask `tick` every `interval` seconds or so."""

    def __init__(self, pid: int, interval: float) -> None:
        self._process = psutil.Process(pid)
        self._longest = 2 * interval
        """Of a pause between two looks, what was seen of it: if it took longer, this process did not run either."""
        self._looked = time.monotonic()
        self._cpu = self._cpu_seconds(self._family())
        self.computed = 0.0
        """CPU seconds."""
        self.rested = 0.0
        """Seconds in which none of them wanted to run."""
        self.stopped = 0.0
        """Seconds in which they were stopped."""
        self.watched = 0.0
        """Seconds in which anybody looked."""

    @property
    def own(self) -> float:
        """Seconds of their own."""
        return self.computed + self.rested

    def tick(self) -> None:
        """Look. Raises psutil.NoSuchProcess where the process has gone."""
        family = self._family()
        now, cpu = time.monotonic(), max(self._cpu, self._cpu_seconds(family))
        passed, used = min(now - self._looked, self._longest), cpu - self._cpu
        self._looked, self._cpu = now, cpu
        states = {state for process in family for state in _thread_states(process)}
        self.computed += used
        self.watched += passed
        if states <= _AT_REST:
            self.rested += max(0.0, passed - used)
        elif states & _STOPPED:
            self.stopped += passed

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _cpu_seconds(self, family: list[psutil.Process]) -> float:
        """Of those that are there, and those that they waited for."""
        seconds = 0.0
        for process in family:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds


def _thread_states(process: psutil.Process) -> Iterator[str]:
    """One letter a thread, as in /proc; of the process where there is no /proc."""
    tasks = Path(f"/proc/{process.pid}/task")
    if not tasks.is_dir():
        with suppress(psutil.NoSuchProcess):
            yield {psutil.STATUS_SLEEPING: "S", psutil.STATUS_STOPPED: "T"}.get(process.status(), "R")
        return
    try:
        threads = list(tasks.iterdir())
    except OSError:  # the process has ended
        return
    for task in threads:
        with suppress(OSError):  # the thread has ended
            yield (task / "stat").read_text().rpartition(")")[2].split()[0]
