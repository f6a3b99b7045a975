"""A grader process: a fresh Python with the code that the run recorded, killed where it makes no progress.

How the grading of a sample ends, and who caused it:

| the process | cause |
|---|---|
| answers | none: the grader's answer counts |
| reports that memory, disk, files or processes ran out (memory: only without `rm_memory`) | the machine |
| computes for `rm_timeout` seconds | the sample |
| computes and sleeps for `rm_timeout` seconds of its own (`OwnTime`), sleeping the longer | the sample |
| ends itself or hangs up: an exit code, a signal such as SIGSEGV, a closed connection | the sample |
| is ended from outside: SIGKILL as by the OOM killer, SIGTERM, SIGBUS where memory or disk ran out | the machine |
| is stopped, or makes no progress for `PATIENCE` times `rm_timeout` seconds on the wall clock | the machine |

A call with several samples has that many times `rm_timeout`. Calls of a coroutine function run concurrently. The
process itself cancels a call that takes too long, and reports that. A call that blocks the others also blocks this
report: the process is killed after twice the time. Then, and where a process is lost, the cause applies to all calls in
flight.

One such outcome does not decide yet: see `cairn.tasks.grading.pool`.
"""

import select
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from cairn.engines.processes.child import Child, output_file
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.tasks.grading.graders import grader_version
from cairn.tasks.grading.worker import Answer, ErrorCause, Terms, timeout_message
from cairn.tasks.rewards.grader import NamedGrader

_AT_REST = frozenset("SIZX")  # sleeping, idle kernel thread, ended
_STOPPED = frozenset("Tt")


class OwnTime:
    """Time that a process and its descendants spent on their own, since this object was created.

    | what the processes do | counts as own time |
    |---|---|
    | compute | the CPU time they use |
    | sleep, or wait for a lock, a socket or an answer: no thread of theirs is runnable | the elapsed time |
    | are runnable and get no CPU, wait for a disk, are stopped, or the whole machine is | nothing |

    So own time is how long a sample keeps its grader busy, without the time that the machine keeps the grader waiting.
    It is the same on an idle machine and on one that is busy, was paused or swaps. Limits apply to it. The wall clock
    only serves to give up a process that makes no progress. Call `tick` about every `interval` seconds.
    """

    def __init__(self, pid: int, interval: float) -> None:
        self._process = psutil.Process(pid)
        self._longest = 2 * interval
        """Longest time between two looks that counts, in seconds: in a longer pause this process did not run either."""
        self._looked = time.monotonic()
        self._cpu = self._cpu_seconds(self._family())
        self.computed = 0.0
        """CPU seconds."""
        self.slept = 0.0
        """Seconds in which no process was runnable."""
        self.stopped = 0.0
        """Seconds in which processes were stopped."""
        self.watched = 0.0
        """Seconds that were observed."""

    @property
    def own(self) -> float:
        """Seconds of own time: computing and sleeping."""
        return self.computed + self.slept

    def tick(self) -> None:
        """Look at the processes, and add to the times. Raises psutil.NoSuchProcess where the process is gone."""
        family = self._family()
        now, cpu = time.monotonic(), max(self._cpu, self._cpu_seconds(family))
        passed, used = min(now - self._looked, self._longest), cpu - self._cpu
        self._looked, self._cpu = now, cpu
        states = {state for process in family for state in _thread_states(process)}
        self.computed += used
        self.watched += passed
        if states <= _AT_REST:
            self.slept += max(0.0, passed - used)
        elif states & _STOPPED:
            self.stopped += passed

    def _family(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]

    def _cpu_seconds(self, family: list[psutil.Process]) -> float:
        """Return the CPU seconds of the processes that exist, and of the children that they waited for."""
        seconds = 0.0
        for process in family:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system + times.children_user + times.children_system
        return seconds


def _thread_states(process: psutil.Process) -> Iterator[str]:
    """Yield the state of each thread, a letter as in /proc; without /proc the state of the process."""
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


START_TIMEOUT = 120.0
"""Seconds that a grader process may take to import its grader."""
STARTS = 3
"""Attempts to start a process, each of which may be killed or too late."""
PATIENCE = 30
"""Factor on the time limit after which a process is given up on the wall clock: the machine gives it less than a
thirtieth of a core."""
TICK = 0.25
"""Seconds between two looks at a process that has not answered."""


class Cause(StrEnum):
    """Cause of a sample's missing grade."""

    SAMPLE = "sample"
    """The grader itself, over this sample, as far as this process shows."""
    SAMPLE_FOR_SURE = "sample for sure"
    """The sample, certainly: it exceeded its CPU time, to which nothing outside adds in a process that saw only this
    sample."""
    MACHINE = "machine"
    """Something that happened to the process."""


@dataclass(frozen=True)
class Lost:
    """A process that ended, or was ended, over a sample."""

    blame: Cause
    error: str


class GraderProcess:
    """A grader process. It starts when first needed, and again after it ended."""

    def __init__(self, grader: NamedGrader, terms: Terms) -> None:
        self._grader = grader
        self._terms = terms
        self._prints = grader.path if grader.path == grader.name else None
        """User code, for the file of what it prints."""
        self._tick = min(TICK, terms.timeout / 8)
        self._child: Child | None = None
        self._stopped = False
        self._lock = threading.Lock()
        """Lock that is held while the process is replaced: another thread may call `stop`."""

    def grade(self, calls: Sequence[Sequence[Any]]) -> list[list[Answer] | Lost]:
        """Return the outcome of each call, in order: answers for its samples, or how the process was lost.

        Raises GraderFailed.
        """
        outcomes: dict[int, list[Answer] | Lost] = {}
        while left := [position for position in range(len(calls)) if position not in outcomes]:
            new = self._grade_while_alive([calls[position] for position in left])
            outcomes |= {left[place]: outcome for place, outcome in new.items()}
        return [outcomes[position] for position in range(len(calls))]

    def grade_fresh(self, call: Sequence[Any]) -> list[Answer] | Lost:
        """Return the outcome of one call in a process that has seen no other."""
        self.kill()
        return self.grade([call])[0]

    def _grade_while_alive(self, calls: Sequence[Sequence[Any]]) -> dict[int, list[Answer] | Lost]:
        """Return outcomes by position, up to and including the first calls that the process does not survive."""
        child = self.start()
        outcomes: dict[int, list[Answer] | Lost] = {}
        lost: Lost | None = None
        samples = max(map(len, calls))
        try:
            self._send(child, calls)
            while len(outcomes) < len(calls) and lost is None:
                first = next(position for position in range(len(calls)) if position not in outcomes)
                lost = self._wait(child, self._terms.timeout * (samples if self._terms.waits else len(calls[first])))
                if lost is None:
                    position, answers = child.connection.recv()
                    lost = _machine_failure(answers)
                    if lost is None:
                        outcomes[position] = answers
        except (EOFError, OSError, psutil.NoSuchProcess):
            lost = self._exit_cause(child)
        if lost is not None:
            self.kill()
            left = (position for position in range(len(calls)) if position not in outcomes)
            outcomes |= dict.fromkeys(islice(left, self._terms.at_once), lost)  # they are begun in their order
        return outcomes

    def _wait(self, child: Child, limit: float) -> Lost | None:
        """Wait until the next answer, or the end of the process, can be received.

        Returns why the process has to be killed where its time is over: `limit` seconds of its own, or twice as many
        where the process enforces the limit itself.
        """
        allowed = 2 * limit if self._terms.waits else limit
        clock: OwnTime | None = None
        ready = select.poll()  # a connection makes a new one for every question, which is most of what an answer costs
        ready.register(child.connection, select.POLLIN)
        while not ready.poll(1000 * self._tick):
            if clock is None:
                clock = OwnTime(child.pid, self._tick)
                continue
            clock.tick()
            if child.is_gone:
                return self._exit_cause(child)
            if clock.own > allowed:
                blame = Cause.SAMPLE_FOR_SURE if clock.computed > clock.slept else Cause.SAMPLE
                return Lost(blame, timeout_message(limit))
            if clock.stopped > allowed:
                return Lost(Cause.MACHINE, f"the grader's process was stopped for {clock.stopped:.3g} s")
            if clock.watched > allowed * PATIENCE:
                return Lost(Cause.MACHINE, f"the grader got {clock.own:.3g} of {clock.watched:.3g} s of CPU time")
        return None

    def _send(self, child: Child, calls: Sequence[Sequence[Any]]) -> None:
        """Send the calls, or break the connection: a process that was stopped would never receive them."""
        late = threading.Timer(max(self._terms.timeout, 1.0), child.interrupt)
        late.daemon = True
        late.start()
        try:
            child.connection.send(list(calls))
        finally:
            late.cancel()

    def start(self) -> Child:
        """Return the running process; a new process is ready to grade then. Raises GraderFailed."""
        if self._child is not None and self._child.has_ended:
            self.kill()  # it died idle, which is no sample's fault
        if self._child is None:
            self._require_recorded_code()
            for start in range(1, STARTS + 1):
                failure = self._await_ready(self._launch())
                if failure is None:
                    break
                if start == STARTS:
                    raise GraderUnavailable(f"the process of grader {self._grader.name} {failure}, {STARTS} times")
            self._require_recorded_code()  # read before and after: so it is what was imported
        assert self._child is not None
        return self._child

    def stop(self) -> None:
        """Kill the running process and allow no new one. Called from another thread."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.interrupt()

    def kill(self) -> int:
        """End the process and its group. Return its exit code as in Popen, 0 if there is no process."""
        with self._lock:
            child, self._child = self._child, None
            return 0 if child is None else child.kill()

    def _require_recorded_code(self) -> None:
        version = grader_version(self._grader)
        if version != self._grader.version:
            self.kill()
            raise GraderFailed(
                f"the source of grader {self._grader.name} was changed while the run used it (version "
                f"{self._grader.version}, now {version}): undo the change and run `cairn resume`, or run `cairn fork` "
                "to use the new source"
            )

    def _launch(self) -> Child:
        terms = (str(self._terms.takes), *astuple(self._terms)[1:])
        with self._lock:
            if self._stopped:
                raise GraderFailed(f"the pool of grader {self._grader.name} is closed")
            self._child = Child("cairn.tasks.grading.worker", (self._grader.path, terms), source=self._prints)
            return self._child

    def _await_ready(self, child: Child) -> str | None:
        """Return None, or what kept the process from starting. Raises GraderFailed if it ended by itself."""
        try:
            if child.connection.poll(START_TIMEOUT):
                child.connection.recv()
                return None
            self.kill()
            return f"did not start within {START_TIMEOUT:g} s"
        except (EOFError, OSError):
            lost = self._exit_cause(child)
        self.kill()
        if lost.blame is Cause.MACHINE:
            return "was killed while it loaded the grader"
        place = "its output above" if self._prints is None else output_file(self._prints)
        raise GraderFailed(f"the process of grader {self._grader.name} ended while it loaded the grader; see {place}")

    def _exit_cause(self, child: Child) -> Lost:
        """Return how a process ended that hung up or is gone. Its group, which may outlive it, is killed."""
        ended = child.wait()
        if ended.hung_up:
            return Lost(Cause.SAMPLE, "the grader closed the connection of its process")
        how = f"exit code {ended.code}" if ended.signal is None else f"signal {-ended.code}"
        blame = Cause.MACHINE if ended.from_outside else Cause.SAMPLE
        return Lost(blame, f"the grader's process died with {how}")


def _machine_failure(answers: Sequence[Answer]) -> Lost | None:
    """Return the loss if the machine kept a call from being graded, else None."""
    return next((Lost(Cause.MACHINE, error or "") for *_, error, cause in answers if cause is ErrorCause.MACHINE), None)
