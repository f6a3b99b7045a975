"""Grading in processes of its own, each sample with a deadline.

Graders are user code and computer algebra: they hang, leak and crash. Each runs in a fresh Python process that imports
the grader and nothing of this one (`multiprocessing` would import this process's main module again), is killed when a
sample takes too long, and is replaced. Nothing a grader does harms the pool or another sample.
"""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from configs.schema.reward import RewardConfig
from tasks.rewards import NamedGrader, get_grader

T = TypeVar("T")

Sample = tuple[str, str | None, dict[str, Any]]
"""Response, label, metadata."""

START_TIMEOUT = 120.0
"""Seconds that a grader process may take to import its grader."""

CHUNKS_PER_WORKER = 4
"""Parts that a batch is cut into for each process: enough for an even load."""


_STDERR = 2


class GraderFailed(Exception):
    """No grader process runs: its import failed or took too long, or the pool is closed."""


@dataclass(frozen=True)
class Graded:
    """What a grader said of one sample. Without a reward the sample has failed, and `error` says how."""

    reward: float | None
    components: dict[str, Any] | None = None
    error: str | None = None


class GraderPool:
    """`num_workers` processes of the configured grader. Thread-safe; batches of several threads share them."""

    def __init__(self, config: RewardConfig) -> None:
        """Starts the processes, without waiting for them. Raises BadPlugin if the grader is unknown."""
        self._grader = get_grader(config)
        # The kernel ties a process to the thread that starts it: these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="grader")
        self._workers = [_Worker(self._grader, config.rm_timeout) for _ in range(config.num_workers)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
            self._threads.submit(self._with_worker, _Worker.start)

    @property
    def name(self) -> str:
        """Of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Of the grader: it changes with its code."""
        return self._grader.version

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """Grade a batch; the results stand in its order.

        A sample that the grader fails on, or takes longer than `rm_timeout` over, has an error instead of a reward.
        Raises GraderFailed if the grader's process does not even start.
        """
        size = max(1, -(-len(samples) // (len(self._workers) * CHUNKS_PER_WORKER)))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        graded = self._threads.map(lambda chunk: self._with_worker(lambda worker: worker.grade(chunk)), chunks)
        return list(chain.from_iterable(graded))

    def close(self) -> None:
        """End the processes, the busy ones too; a batch under way ends in GraderFailed."""
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown()
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _with_worker(self, work: Callable[["_Worker"], T]) -> T:
        worker = self._free.get()
        try:
            return work(worker)
        finally:
            self._free.put(worker)


class _Worker:
    """One grader process, started when it is first needed and again after it died."""

    def __init__(self, grader: NamedGrader, timeout: float) -> None:
        self._grader = grader
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._stopped = False
        self._lock = threading.Lock()
        """Held while the process is exchanged: `stop` comes from another thread."""

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        graded: list[Graded] = []
        while len(graded) < len(samples):
            graded += self._grade_while_alive(samples[len(graded) :])
        return graded

    def _grade_while_alive(self, samples: Sequence[Sample]) -> list[Graded]:
        """Results up to and with the first sample that the process does not survive."""
        connection = self.start()
        graded: list[Graded] = []
        try:
            self._send(connection, samples)
            while len(graded) < len(samples):
                if not connection.poll(self._timeout):
                    graded.append(Graded(None, error=f"the grader took longer than {self._timeout:g} s"))
                    self.kill()
                    break
                graded.append(Graded(*connection.recv()))
        except (EOFError, OSError):
            code = self.kill()
            how = f"with signal {-code}" if code < 0 else f"with exit code {code}"
            graded.append(Graded(None, error=f"the grader's process died {how}"))
        return graded

    def _send(self, connection: Connection, samples: Sequence[Sample]) -> None:
        """Hand the samples over, or break the connection: a process that was stopped would never take them."""
        late = threading.Timer(self._timeout, self._kill_group)
        late.daemon = True
        late.start()
        try:
            connection.send(list(samples))
        finally:
            late.cancel()

    def start(self) -> Connection:
        """The connection to the running process; a new one is ready to grade when this returns."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # it died idle, which is no sample's fault
        if self._connection is None:
            self._connection = self._launch()
            self._await_ready(self._connection)
        return self._connection

    def stop(self) -> None:
        """From another thread: kill what runs, start nothing more."""
        with self._lock:
            self._stopped = True
            self._kill_group()

    def kill(self) -> int:
        """End the process and what it started; returns its exit code as Popen has it, 0 if there is none."""
        with self._lock:
            if self._process is None or self._connection is None:
                return 0
            self._connection.close()
            self._kill_group()
            code = self._process.wait()
            self._process = self._connection = None
            return code

    def _launch(self) -> Connection:
        here, there = Pipe()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from tasks.rewards.worker import main; "
            f"main({there.fileno()}, {os.getpid()}, {self._grader.path!r})"
        )
        with self._lock, there:
            if self._stopped:
                raise GraderFailed(f"the pool of grader {self._grader.name} is closed")
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # what graders print is no output of this program
                pass_fds=[there.fileno()],
                start_new_session=True,  # what the grader starts is killed with it; Ctrl-C is the driver's affair
            )
        return here

    def _await_ready(self, connection: Connection) -> None:
        try:
            if connection.poll(START_TIMEOUT):
                connection.recv()
                return
            failure = f"did not start within {START_TIMEOUT:g} s"
        except (EOFError, OSError):
            failure = "ended while it loaded it; what it wrote stands above"
        self.kill()
        raise GraderFailed(f"the process of grader {self._grader.name} {failure}")

    def _kill_group(self) -> None:
        # Until it is waited for, the process keeps its number, dead or alive.
        if self._process is not None and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
