"""Grade samples in a pool of grader processes, so that a sample fails only by what its grader does.

Graders are user code and computer algebra: they hang, leak and crash. Each runs in a fresh Python process that imports
the grader and nothing of this process (`multiprocessing` would import this process's main module again). Machines, too,
kill and stop processes. `cairn.tasks.grading.process` says whether the sample or the machine caused an outcome:

| outcome | result for the sample |
|---|---|
| a reward | that is its reward |
| the grader raises | it fails, with the error |
| the grader raises an error of `retry.grader.errors` | it is graded again after waits, then it fails |
| the same, and then a sample that had a reward before fails so too | neither fails: GraderUnavailable |
| its process computes for too long | a fresh process grades it; if that one does too, it fails |
| its process sleeps for too long, or ends itself | the same with `FRESH_PROCESSES` fresh processes |
| the machine ends its process or gives it no time | the same, alone in the pool; after `KILLED` GraderUnavailable |
| a coroutine function does not return in time | it is called `FRESH_PROCESSES` times more, then the sample fails |

A built-in grader that reads responses does not fail a sample where its process computes for too long or ends. It gives
the reward of a wrong answer, with the reason as `error` in the components: the response itself caused that. A failed
sample would drop its group, and the policy would never unlearn the answer. The cause in a user's grader is unknown.

If one call grades a whole group, its samples share the outcome. If a call that grades a mere batch fails, each of its
samples is graded alone.

So load, pauses and killed processes cost time. They never fail a sample, and no other sample is trained on in its
place. A problem that the sample did not cause is an error of the step, which is retried and then ends the run.
"""

import queue
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any

from cairn.configs.schema.operations import GraderRetries
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.types.errors import GraderFailed, GraderUnavailable
from cairn.tasks.grading.graders import get_grader, named_by_row
from cairn.tasks.grading.process import Cause, GraderProcess, Lost
from cairn.tasks.grading.worker import Answer, ErrorCause, Terms
from cairn.tasks.rewards.grader import Graded, Takes
from cairn.tasks.rewards.sample import Sample

CHUNKS_PER_WORKER = 4
"""Chunks of a batch for each process: enough for an even load."""
FRESH_PROCESSES = 2
"""Fresh processes that may end themselves over a sample, or sleep for too long, before it fails."""
KILLED = 5
"""Processes that the machine may end over a sample before the pool gives up."""
FIRST_WAIT = 0.5
"""Seconds before the second of these processes; the wait doubles with each."""


class GraderPool:
    """A pool with `num_workers` processes of the configured grader, and as many of each grader that data rows name.
    Thread-safe: several threads share the processes."""

    sees_messages = False

    def __init__(
        self,
        config: RewardConfig,
        retries: GraderRetries | None = None,
        args: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """Start the processes, without waiting for them. Raises BadPlugin if the grader is unknown. `args`: see
        `get_grader`."""
        self._config = config
        self._grader = get_grader(config, args)
        self._retries = retries or GraderRetries()
        # The kernel ties a process to the thread that starts it: these threads live as long as the pool.
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="grader")
        terms = Terms(
            takes=self._grader.takes,
            waits=self._grader.waits,
            timeout=config.rm_timeout,
            concurrency=config.rm_concurrency,
            memory=config.rm_memory,
            transient=self._retries.errors,
            reward_key=config.reward_key,
            boxed=self._grader.boxed,
            args=dict(self._grader.args),
        )
        self._workers = [GraderProcess(self._grader, terms) for _ in range(config.num_workers)]
        self._free: queue.SimpleQueue[GraderProcess] = queue.SimpleQueue()
        self._taking_all, self._opening = threading.Lock(), threading.Lock()
        self._closed = threading.Event()
        self._of_rows: dict[str, GraderPool] = {}
        self._gradable: list[Sample] = []
        """Samples of one call that got rewards."""
        for worker in self._workers:
            self._free.put(worker)
            self._threads.submit(self._start_one)

    @property
    def name(self) -> str:
        """Name of the grader."""
        return self._grader.name

    @property
    def version(self) -> str:
        """Version of the grader: it changes with its code."""
        return self._grader.version

    @property
    def sees_whole_samples(self) -> bool:
        """Whether the grader reads more of a sample than response, label and metadata."""
        return self._grader.whole_sample

    @property
    def sees_tokens(self) -> bool:
        """Whether the grader may read a sample's tokens, too."""
        return self._grader.sees_tokens

    @property
    def by_group(self) -> bool:
        """Whether the grader grades whole groups."""
        return self._config.group_rm

    def graded_by(self, sample: Sample) -> tuple[str, str]:
        """Return name and version of the grader of a sample: see `Rememberable.graded_by`."""
        pool = self._named(named_by_row(self._config, sample.metadata))
        return pool.name, pool.version

    def can_grade(self, sample: Sample) -> None:
        """Store a sample that got a reward before: see `Rememberable.can_grade`."""
        pool = self._named(named_by_row(self._config, sample.metadata))
        pool._gradable = pool._gradable or [sample]

    def grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None = None) -> list[Graded]:
        """Grade a batch, and return the results in its order. See the module for what fails a sample.

        Args:
            groups: the group of each sample; with `reward.group_rm` all samples of a group have to be present.

        Raises:
            GraderUnavailable: the machine, or what the grader calls, did not let it work.
            GraderFailed: the grader's process does not start, its code has changed, or the pool was closed.
            BadPlugin: the row of a sample names a grader that does not exist.
        """
        named = [named_by_row(self._config, sample.metadata) for sample in samples]
        if not any(named):
            return self._grade(samples, groups)
        graded: dict[int, Graded] = {}
        for name in dict.fromkeys(named):
            pool, own = self._named(name), [i for i, other in enumerate(named) if other == name]
            of = None if groups is None else [groups[i] for i in own]
            graded |= dict(zip(own, pool._grade([samples[i] for i in own], of), strict=True))
        return [graded[i] for i in range(len(samples))]

    def _named(self, name: str | None) -> "GraderPool":
        """Return the pool of the grader that a row names."""
        if name is None or name == self.name:
            return self
        with self._opening:
            if self._closed.is_set():
                raise GraderFailed(f"the pool of grader {self.name} is closed")
            if name not in self._of_rows:
                self._of_rows[name] = GraderPool(self._config.of(name), self._retries)
            return self._of_rows[name]

    def _grade(self, samples: Sequence[Sample], groups: Sequence[Hashable] | None) -> list[Graded]:
        graded = self._grade_once(samples, self._calls(range(len(samples)), groups))
        waited = 0.0
        for delay in self._retries.delays():
            retried = {i for i, one in graded.items() if one.transient}
            if not retried:
                break
            self._closed.wait(delay)
            waited += delay
            if self.by_group and groups is not None:
                retried_groups = {groups[i] for i in retried}
                retried = {i for i, group in enumerate(groups) if group in retried_groups}
            for i, one in self._grade_once(samples, self._calls(sorted(retried), groups)).items():
                graded[i] = replace(one, tries=graded[i].tries + one.tries, waited=waited)
        outcomes = [graded[i] for i in range(len(samples))]
        left = [one for one in outcomes if one.transient]
        alone = [[i] for i in range(len(samples))]
        for call in self._calls(range(len(samples)), groups) if self.by_group else alone:
            if all(graded[i].graded.reward is not None for i in call):
                self._gradable = [samples[i] for i in call]
        if left and not self._answers():
            raise GraderUnavailable(
                f"grader {self.name} could not grade {len(left)} of {len(graded)} samples in {left[0].tries} tries, "
                f"and now fails on samples that it graded before: {left[0].graded.error}"
            )
        return [
            replace(one.graded, tries=one.tries, waited=one.waited, grader=self.name, version=self.version)
            for one in outcomes
        ]

    def close(self) -> None:
        """End the processes, busy ones too. A batch in flight raises GraderFailed."""
        with self._opening:
            self._closed.set()
        for pool in self._of_rows.values():
            pool.close()
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
        """Whether the grader can grade now what it graded before."""
        if not self._gradable:
            return False
        return not any(one.transient for one in self._grade_once(self._gradable, [range(len(self._gradable))]).values())

    def _calls(self, positions: Sequence[int], groups: Sequence[Hashable] | None) -> list[Sequence[int]]:
        """Return the positions of the samples that each call grades."""
        if self.by_group:
            if groups is None:
                raise ValueError("a grader of groups needs the group of each sample")
            of: dict[Hashable, list[int]] = {}
            for i in positions:
                of.setdefault(groups[i], []).append(i)
            return list(of.values())
        size = self._config.rm_batch_size if self._grader.takes.several else 1
        return [positions[start : start + size] for start in range(0, len(positions), size)]

    def _grade_once(self, samples: Sequence[Sample], calls: Sequence[Sequence[int]]) -> dict[int, "_Outcome"]:
        """Return the outcome of every sample, by its position: an answer of a process, or a failure that the sample
        caused."""
        messages = [[self._message(samples[i]) for i in call] for call in calls]
        outcomes_of_calls = self._together(messages)
        for _ in range(FRESH_PROCESSES):
            late = [place for place, one in enumerate(outcomes_of_calls) if not isinstance(one, Lost) and _is_late(one)]
            for place, one in zip(late, self._together([messages[place] for place in late]), strict=True):
                outcomes_of_calls[place] = one
        graded: dict[int, _Outcome] = {}
        alone: list[int] = []
        lost: list[tuple[Sequence[int], list[Any], Lost]] = []
        for call, message, one in zip(calls, messages, outcomes_of_calls, strict=True):
            if len(call) > 1 and not self.by_group and (isinstance(one, Lost) or not _has_reward(one)):
                alone += call
            elif isinstance(one, Lost):
                lost.append((call, message, one))
            else:
                graded |= dict(zip(call, map(_Outcome.of, one), strict=True))
        fresh = self._threads.map(lambda its: self._grade_fresh(*its[1:]), lost)
        for (call, _, _), outcomes in zip(lost, fresh, strict=True):
            graded |= dict(zip(call, outcomes, strict=True))
        if alone:
            for i, outcome in self._grade_once(samples, [[i] for i in alone]).items():
                graded[i] = replace(outcome, tries=1 + outcome.tries)
        return graded

    def _together(self, calls: Sequence[list[Any]]) -> list[list[Answer] | Lost]:
        parts = len(self._workers) * (1 if self._grader.waits else CHUNKS_PER_WORKER)
        size = max(1, -(-len(calls) // parts))
        chunks = [calls[start : start + size] for start in range(0, len(calls), size)]
        return list(chain.from_iterable(self._threads.map(self._grade_chunk, chunks)))

    def _start_one(self) -> None:
        with self._one() as worker:
            worker.start()

    def _grade_chunk(self, calls: Sequence[list[Any]]) -> list[list[Answer] | Lost]:
        with self._one() as worker:
            return worker.grade(calls)

    def _grade_fresh(self, call: list[Any], lost: Lost) -> list["_Outcome"]:
        """Grade a call in fresh processes, until one answers or the samples fail. `lost` is the outcome of the shared
        process."""
        tries, ended, killed = 1, 0, int(lost.blame is Cause.MACHINE)
        while True:
            with self._all() if killed else self._one() as worker:
                outcome = worker.grade_fresh(call)
            tries += 1
            if not isinstance(outcome, Lost):
                return [replace(_Outcome.of(one), tries=tries) for one in outcome]
            if outcome.blame is not Cause.MACHINE:
                ended += 1
                if ended == FRESH_PROCESSES or outcome.blame is Cause.SAMPLE_FOR_SURE:
                    return [_Outcome(self._grade_of_lost_sample(outcome), tries=tries)] * len(call)
                continue
            killed += 1
            if killed >= KILLED:
                raise GraderUnavailable(
                    f"{killed} processes of grader {self.name} were lost on one sample ({outcome.error}): give the "
                    "machine more memory, or set reward.rm_memory, so that a sample that needs more fails"
                )
            self._closed.wait(FIRST_WAIT * 2.0 ** (killed - 1))

    def _grade_of_lost_sample(self, lost: Lost) -> Graded:
        """Return the grade of a sample that no process could grade, by its own fault."""
        wrong = self._grader.wrong
        return Graded(None, error=lost.error) if wrong is None else Graded(wrong, {"error": lost.error})

    def _message(self, sample: Sample) -> Any:
        if self._grader.whole_sample:
            return sample
        texts = sample.response, sample.label, sample.metadata
        if self._grader.takes is Takes.SOLUTION:
            return texts[:2]
        return (sample.metadata.get("data_source"), *texts) if self._grader.takes is Takes.VERL else texts

    @contextmanager
    def _one(self) -> Iterator[GraderProcess]:
        """Yield a process for exclusive use. Call it in a thread of the pool."""
        worker = self._free.get()
        try:
            yield worker
        finally:
            self._free.put(worker)

    @contextmanager
    def _all(self) -> Iterator[GraderProcess]:
        """Yield a process while all others are idle. Call it in a thread of the pool that holds no process."""
        with self._taking_all, ExitStack() as stack:
            workers = [stack.enter_context(self._one()) for _ in self._workers]
            yield workers[0]


@dataclass(frozen=True)
class _Outcome:
    graded: Graded
    transient: bool = False
    """Whether a retry may succeed."""
    tries: int = 1
    waited: float = 0.0

    @classmethod
    def of(cls, answer: Answer) -> "_Outcome":
        reward, components, error, cause = answer
        return cls(Graded(reward, components, error), cause is ErrorCause.SERVICE)


def _has_reward(answers: Sequence[Answer]) -> bool:
    return any(reward is not None for reward, *_ in answers)


def _is_late(answers: Sequence[Answer]) -> bool:
    return any(cause is ErrorCause.UNKNOWN for *_, cause in answers)
