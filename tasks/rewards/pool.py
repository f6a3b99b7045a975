"""Grading in processes of its own, so arranged that a sample fails by what its grader does, and by nothing else.

Graders are user code and computer algebra: they hang, leak and crash. Each runs in a fresh Python process that imports
the grader and nothing of this one (`multiprocessing` would import this process's main module again). And machines kill
and stop processes at will. What happens to a sample, whose doing each outcome is being said by
`cairn.tasks.rewards.process`:

| outcome | what becomes of the sample |
|---|---|
| a reward | that is its reward |
| the grader raises | it fails, with the error |
| the grader raises an error of `retry.grader.errors` | it is graded again after waits, then it fails |
| the same, and then a sample that had a reward before gets no other answer | neither fails: GraderUnavailable |
| its process computes for too long | a fresh process grades it; if that one does too, it fails |
| its process sleeps for too long, or ends itself | the same with `FRESH` fresh processes |
| the machine ends its process or gives it no time | the same, alone in the pool; after `KILLED` GraderUnavailable |

So load, pauses and killed processes cost time. They never fail a sample, and never make another one train in its place:
what is not decided by the sample ends in an error of the step, which is tried again and then ends the run.
"""

import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.rewards import get_grader
from cairn.tasks.rewards.process import Blame, GraderFailed, GraderProcess, GraderUnavailable, Lost
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.rewards.worker import Answer, Whose

__all__ = ["Graded", "GraderFailed", "GraderPool", "GraderUnavailable"]

CHUNKS_PER_WORKER = 4
"""Parts that a batch is cut into for each process: enough for an even load."""
FRESH = 2
"""Fresh processes that may end themselves over a sample, or sleep for too long, before it fails."""
KILLED = 5
"""Processes that the machine may take from a sample before it is no use to start another."""
FIRST_WAIT = 0.5
"""Seconds before the second of them; the wait doubles with each."""


@dataclass(frozen=True)
class Graded:
    """What a grader said of one sample. Without a reward the sample has failed, and `error` says how."""

    reward: float | None
    components: dict[str, Any] | None = None
    error: str | None = None
    tries: int = field(default=1, compare=False)
    """Times that it was graded."""
    waited: float = field(default=0.0, compare=False)
    """Seconds between them."""


class GraderPool:
    """`num_workers` processes of the configured grader. Thread-safe; batches of several threads share them."""

    def __init__(self, config: RewardConfig, retries: GraderRetries | None = None) -> None:
        """Starts the processes, without waiting for them. Raises BadPlugin if the grader is unknown."""
        self._grader = get_grader(config)
        self._retries = retries or GraderRetries()
        # The kernel ties a process to the thread that starts it: these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="grader")
        self._workers = [
            GraderProcess(self._grader, config.rm_timeout, config.rm_memory, self._retries.errors)
            for _ in range(config.num_workers)
        ]
        self._free: queue.SimpleQueue[GraderProcess] = queue.SimpleQueue()
        self._taking_all = threading.Lock()
        self._closed = threading.Event()
        self._gradable: Sample | None = None
        """A sample that got a reward."""
        for worker in self._workers:
            self._free.put(worker)
            self._threads.submit(self._start_one)

    @property
    def name(self) -> str:
        """Of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Of the grader: it changes with its code."""
        return self._grader.version

    @property
    def sees_whole_samples(self) -> bool:
        """Whether the grader reads more of a sample than response, label and metadata."""
        return self._grader.whole_sample

    def grade(self, samples: Sequence[Sample]) -> list[Graded]:
        """Grade a batch; the results stand in its order. See the module for what fails a sample.

        Raises:
            GraderUnavailable: the machine, or what the grader asks, did not let it work.
            GraderFailed: the grader's process does not even start, its code has changed, or the pool was closed.
        """
        graded = self._grade_once(samples)
        waited = 0.0
        for delay in self._retries.delays():
            again = [i for i, one in enumerate(graded) if one.transient]
            if not again:
                break
            self._sleep(delay)
            waited += delay
            for i, one in zip(again, self._grade_once([samples[i] for i in again]), strict=True):
                graded[i] = replace(one, tries=graded[i].tries + one.tries, waited=waited)
        for sample, one in zip(samples, graded, strict=True):
            if one.graded.reward is not None:
                self._gradable = sample
        left = [one for one in graded if one.transient]
        if left and not self._answers():
            raise GraderUnavailable(
                f"grader {self.name} could not grade {len(left)} of {len(graded)} samples in {left[0].tries} tries, "
                f"and now not even what it graded before: {left[0].graded.error}"
            )
        return [replace(one.graded, tries=one.tries, waited=one.waited) for one in graded]

    def close(self) -> None:
        """End the processes, the busy ones too; a batch under way ends in GraderFailed."""
        self._closed.set()
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown()
        for worker in self._workers:
            worker.kill()

    def __enter__(self) -> "GraderPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answers(self) -> bool:
        """Whether the grader grades now what it has graded before."""
        return self._gradable is not None and not self._grade_once([self._gradable])[0].transient

    def _grade_once(self, samples: Sequence[Sample]) -> list["_Outcome"]:
        """Every sample by a process that answered, or failed by its own doing."""
        size = max(1, -(-len(samples) // (len(self._workers) * CHUNKS_PER_WORKER)))
        chunks = [samples[start : start + size] for start in range(0, len(samples), size)]
        together = list(chain.from_iterable(self._threads.map(self._grade_chunk, chunks)))
        lost = {i: outcome for i, outcome in enumerate(together) if isinstance(outcome, Lost)}
        fresh = self._threads.map(lambda i: self._grade_fresh(samples[i], lost[i]), lost)
        again = dict(zip(lost, fresh, strict=True))
        return [again[i] if isinstance(one, Lost) else _Outcome.of(one) for i, one in enumerate(together)]

    def _start_one(self) -> None:
        with self._one() as worker:
            worker.start()

    def _grade_chunk(self, samples: Sequence[Sample]) -> list[Answer | Lost]:
        with self._one() as worker:
            return worker.grade([self._message(sample) for sample in samples])

    def _grade_fresh(self, sample: Sample, lost: Lost) -> "_Outcome":
        """By fresh processes, until one answers or the sample fails; `lost` is what happened to it in company."""
        tries, ended, killed = 1, 0, int(lost.blame is Blame.MACHINE)
        while True:
            with self._all() if killed else self._one() as worker:
                outcome = worker.grade_fresh(self._message(sample))
            tries += 1
            if not isinstance(outcome, Lost):
                return replace(_Outcome.of(outcome), tries=tries)
            if outcome.blame is not Blame.MACHINE:
                ended += 1
                if ended == FRESH or outcome.blame is Blame.SAMPLE_FOR_SURE:
                    return _Outcome(Graded(None, error=outcome.error), tries=tries)
                continue
            killed += 1
            if killed >= KILLED:
                raise GraderUnavailable(
                    f"{killed} processes of grader {self.name} were lost over one sample ({outcome.error}): give the "
                    "machine memory and time for it, or set reward.rm_memory, so that a sample that wants more fails"
                )
            self._sleep(FIRST_WAIT * 2.0 ** (killed - 1))

    def _message(self, sample: Sample) -> Any:
        return sample if self._grader.whole_sample else (sample.response, sample.label, sample.metadata)

    def _sleep(self, seconds: float) -> None:
        self._closed.wait(seconds)

    @contextmanager
    def _one(self) -> Iterator[GraderProcess]:
        """A process to oneself. In a thread of the pool."""
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    @contextmanager
    def _all(self) -> Iterator[GraderProcess]:
        """A process to oneself, while all others rest. In a thread of the pool that holds none."""
        with self._taking_all, ExitStack() as held:
            workers = [held.enter_context(self._one()) for _ in self._workers]
            yield workers[0]


@dataclass(frozen=True)
class _Outcome:
    graded: Graded
    transient: bool = False
    """It failed by something that a new try can mend."""
    tries: int = 1
    waited: float = 0.0

    @classmethod
    def of(cls, answer: Answer) -> "_Outcome":
        reward, components, error, whose = answer
        return cls(Graded(reward, components, error), whose is Whose.SERVICE)
