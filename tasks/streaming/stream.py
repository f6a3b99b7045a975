"""The stream of a run whose `rollout.pipeline` is `streaming`: samples are generated all the time, whoever learns.

    admit     prompts become open groups, at most `max_age` iterations ahead of learning, as few as do
              (`cairn.tasks.streaming.pacing`)
    generate  each engine works on the samples of its groups with the newest weights there are: it is brought to them
              between two decoding steps, and given the samples of new groups, while it works
    take      a rollout step takes the groups of its round: those that are complete, the first ones first

What happens here depends on time and is nobody's until a rollout step commits which groups it took, with their samples.
What an engine has made is durable before (`cairn.storage.stream_log`), so that the next driver goes on from it.

A round takes a group that it would otherwise leave to be too old for the next iteration, and waits for it if it is not
complete: a bound on age must not starve the prompts whose answers are long.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np
import pyarrow as pa

from cairn.engines.episodes.records import CallRecord
from cairn.engines.errors import EngineError
from cairn.engines.trajectories import FIRST_CALL, GeneratedSample, SampleKey, SampleRequest, Segment, Trajectory
from cairn.engines.types import FinishReason
from cairn.storage.commits import Commit
from cairn.storage.errors import Damaged
from cairn.storage.stream_calls import StreamCallLog
from cairn.storage.stream_log import StreamLog
from cairn.tasks.generation import generate_samples
from cairn.tasks.groups import Group
from cairn.tasks.rollout import sampling_params
from cairn.tasks.step import StepCall
from cairn.tasks.streaming.admit import admission_number
from cairn.tasks.streaming.calls import StreamCalls
from cairn.tasks.streaming.pacing import Backlog
from cairn.tasks.sync import serve, update
from cairn.tasks.versions import version_of, weight_version_after

_AGAIN = 0.02
"""Seconds after which an engine that has not heard an interruption is told again."""


@dataclass(frozen=True)
class OpenGroup:
    """One that is admitted, and that no rollout step has taken."""

    group: Group
    """With its samples as far as they came."""
    admission: Commit
    engine: int
    """Which generates it."""
    recovered: bool = False
    """Whether an earlier driver completed it."""

    @cached_property
    def decided(self) -> bool:
        """Whether nothing of it is to be begun any more: all of its samples have ended, or one has failed."""
        failed = any(part.error is not None for part in self.group.parts.values())
        return failed or not self.group.requests(besides=())

    @cached_property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of its tokens; None where it has none."""
        parts = [part.trajectory.weight_versions for part in self.group.parts.values() if part.trajectory.segments]
        found = [versions for versions in parts if len(versions)]
        return (min(int(v.min()) for v in found), max(int(v.max()) for v in found)) if found else None


@dataclass
class Usage:
    """What engines did."""

    seconds: float = 0.0
    """In which they were at work, all together."""
    interrupted_samples: int = 0
    """How often they left a sample unfinished, to go on with other weights or beside others."""
    recomputed_tokens: int = 0
    """Response tokens that they read again to go on after them."""
    stall: float = 0.0
    """Seconds in which they decoded nothing because their weights were replaced, all together."""


@dataclass(frozen=True)
class Taken:
    """The groups of a round, in the order in which they are taken."""

    groups: tuple[OpenGroup, ...]
    open: dict[str, list[int]]
    """Those that are left, by the names of their admissions."""
    newest: Commit
    """The newest admission."""
    calls: list[CallRecord] | None
    """What the code of their samples was given; None where that is not recorded."""
    usage: "Usage"
    """What engines did since the round before."""
    waited: float
    """Seconds."""


class Stream:
    """That of one driver. Threads may share it."""

    def __init__(
        self,
        call: StepCall,
        weights: Commit | None,
        open_logs: Callable[[Collection[int]], tuple[StreamLog, StreamCallLog | None]],
        groups: Collection[int],
    ) -> None:
        """`call`: for whom it is generated; `weights`: the newest, None for the initial ones; `open_logs` begins
        those of some open groups: of samples and, where their code records calls, of these. `groups` are open now. Use
        `open_stream`."""
        self._run = run = call.run
        self._call = call
        self._weights = weights
        self._changed = threading.Condition()
        self._open: dict[int, OpenGroup] = {}
        self._complete: list[int] = []
        """In the order in which they came."""
        self._taken = -1
        """The newest iteration that has taken groups."""
        self._newest: Commit | None = None
        self._error: Exception | None = None
        self._closed = False
        self._pauses = 0
        self._interrupted = [threading.Event() for _ in run.fleet.rollout]
        self._told = set[int]()
        """The engines that are just being told: what they begin now would be ended too."""
        self._working = [False for _ in run.fleet.rollout]
        self._running: list[dict[SampleKey, SampleRequest]] = [{} for _ in run.fleet.rollout]
        """The samples that each is at."""
        self._serves: list[Commit | None] = [None for _ in run.fleet.rollout]
        """The weights that each works with, or is being brought to."""
        self._ready = [False for _ in run.fleet.rollout]
        """Whether each works, and may be told of what is new."""
        self._attended = set[int]()
        """The engines that are just being told."""
        self._joining = [threading.Lock() for _ in run.fleet.rollout]
        self._joined: list[list[SampleRequest]] = [[] for _ in run.fleet.rollout]
        """What each was given beside what it was at, and its thread has not heard of yet."""
        self._since = [0.0 for _ in run.fleet.rollout]
        """Until when the work of each is counted, if it works."""
        self._usage = Usage()
        self.admitting = threading.Lock()
        """Held by who admits: each admission follows the one before."""
        self._open_logs = open_logs
        self._log, calls = open_logs(groups)
        self._calls = StreamCalls(calls, run.ledger.manifest.identity, call.attempt.name)
        self._threads: list[threading.Thread] = []

    @property
    def newest_admission(self) -> Commit | None:
        """What the next one follows."""
        return self._newest

    def recover(self, groups: Collection[int]) -> pa.Table:
        """See `StreamLog.recover`."""
        return self._log.recover(groups)

    def begin(self) -> None:
        """Generate, from now on."""
        numbers = range(len(self._working))
        work: list[Callable[[], None]] = [
            partial(does, number) for does in (self._generate, self._attend) for number in numbers
        ]
        for one in (*work, self._interrupt):
            self._threads.append(threading.Thread(target=one, name="stream", daemon=True))
            self._threads[-1].start()

    def close(self) -> None:
        """End what is generated; what has come is durable when this returns."""
        with self._changed:
            self._closed = True
            self._interrupt_all()
        for thread in self._threads:
            thread.join()
        self._close_logs()

    def follows(self, admission: Commit) -> bool:
        """Whether an admission comes after all that are known. Raises Damaged where another one has its place."""
        newest = self._newest
        if newest is None:
            return True
        if newest.name != admission.name and admission_number(newest) == admission_number(admission):
            raise Damaged(
                f"{newest.name} and {admission.name} follow the same admission, made by two drivers: their prompts are "
                "the same; start a new run from the weights of this one"
            )
        return admission_number(newest) < admission_number(admission)

    def admit(self, admission: Commit, groups: Sequence[Group]) -> None:
        """Open groups of an admission."""
        with self._changed:
            if self._newest is None or admission_number(admission) > admission_number(self._newest):
                self._newest = admission
            self._calls.admit((group.drawn.group_id for group in groups), admission.iteration)
            for group in groups:
                loads = [sum(one.engine == n for one in self._open.values()) for n in range(len(self._working))]
                one = OpenGroup(group, admission, int(np.argmin(loads)))
                self._open[group.drawn.group_id] = replace(one, recovered=one.decided)
                self._look_whether_complete(group.drawn.group_id)
            self._changed.notify_all()

    def publish(self, weights: Commit | None) -> None:
        """These are the newest from now on."""
        with self._changed:
            self._weights = weights
            self._changed.notify_all()

    def take(self, iteration: int, count: int, tell: Callable[[int], None]) -> Taken:
        """Wait until `count` groups can be taken by a round of an iteration, and say which. They stay until `forget`.
        `tell` is told how many are complete. Raises what an engine raised: a new call lets it try again."""
        began = time.monotonic()
        end = began + self._run.config.rollout.timeout
        bound = self._run.config.rollout.oldest_trained
        oldest = weight_version_after(self._run.ledger, iteration - bound)  # that the next iteration trains on
        with self._changed:
            self._try_again()
            while True:
                if self._error is not None:
                    raise self._error
                if self._run.stopping.is_set():
                    raise EngineError("what is generated was broken off: the driver ends")
                tell(len(self._complete))
                late = {id for id, one in self._open.items() if self._oldest_version(one, oldest) < oldest}
                awaited = [id for id in late if id not in self._complete] if time.monotonic() < end else []
                if len(self._complete) >= count and not awaited:
                    break
                self._changed.wait(1.0)
            ordered = sorted(self._complete, key=lambda id: id not in late)
            chosen = ordered[:count]
            left: dict[str, list[int]] = {}
            for id, one in self._open.items():
                if id not in chosen:
                    left.setdefault(one.admission.name, []).append(id)
            for number in range(len(self._working)):
                self._count_work(number)
            usage, self._usage = self._usage, Usage()
            assert self._newest is not None
            groups = tuple(self._open[id] for id in chosen)
            return Taken(groups, left, self._newest, self._calls.of(chosen), usage, time.monotonic() - began)

    def forget(self, ids: Collection[int], iteration: int) -> None:
        """A rollout step of an iteration has committed these groups."""
        with self._changed:
            self._taken = max(self._taken, iteration)
            for id in ids:
                self._open.pop(id, None)
            self._complete = [id for id in self._complete if id in self._open]
            if not (self._log.broken or self._calls.broken):
                self._calls.after(partial(self._log.forget, ids))
                self._calls.forget(ids)
            self._changed.notify_all()

    @property
    def backlog(self) -> Backlog:
        """What is admitted, and not taken."""
        with self._changed:
            return Backlog(len(self._complete), len(self._open) - len(self._complete), self._taken)

    def wait_until(self, wants_more: Callable[[Backlog], bool]) -> None:
        """Return when it holds of the backlog, or the driver ends. It is asked again when that has changed, or by
        `look_again`."""
        with self._changed:
            while not (self._closed or self._run.stopping.is_set() or wants_more(self.backlog)):
                self._changed.wait(1.0)

    def look_again(self) -> None:
        """Something else has changed."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the engines to oneself."""
        with self._changed:
            self._pauses += 1
            self._interrupt_all()
            self._changed.wait_for(lambda: not any(self._working) and not self._told and not self._attended)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    def _interrupt_all(self) -> None:
        for number, works in enumerate(self._working):
            if works:
                self._interrupted[number].set()
        self._changed.notify_all()

    def _interrupt(self) -> None:
        """In a thread of its own: tell engines until they have heard. One that is told before it begins hears
        nothing."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._to_be_told())
                if self._closed and not any(self._working):
                    return
                self._told = self._to_be_told()
            for number in list(self._told):
                with suppress(Exception):  # the thread of the engine hears of it
                    self._run.fleet.rollout[number].abort()
                with self._changed:
                    self._told.discard(number)
                    self._changed.notify_all()
            time.sleep(_AGAIN)

    def _to_be_told(self) -> set[int]:
        return {n for n, works in enumerate(self._working) if works and self._interrupted[n].is_set()}

    def _generate(self, number: int) -> None:
        """In a thread of its own: all that one engine does."""
        run, engine = self._run, self._run.fleet.rollout[number]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._may_work(number) and self._samples_of(number)))
                if self._closed:
                    return
                samples, weights = self._samples_of(number), self._weights
                rows = {sample.group_id: self._open[sample.group_id].group.drawn.row.index for sample in samples}
                samples = run.response_lengths.longest_first(samples, rows)
                begun = [len(sample.begun) for sample in samples if sample.begun is not None]
                self._usage.recomputed_tokens += sum(begun)
                self._interrupted[number].clear()
                self._running[number] = {sample.key: sample for sample in samples}
                self._serves[number], self._joined[number] = weights, []
                self._working[number], self._since[number] = True, time.monotonic()
            try:
                serve(run, engine, weights)
                with self._changed:
                    self._ready[number] = True
                    self._changed.notify_all()
                call = replace(self._call, shard=f"stream-{number}")
                for generated in generate_samples(
                    call,
                    engine,
                    weights,
                    samples,
                    sampling_params(run.config, kept=run.records_kept),
                    rows=rows,
                    calls=self._calls,
                    interrupted=lambda: self._interrupted[number].is_set() or run.stopping.is_set(),
                    newest=lambda: self._serves[number],
                    joined=lambda: self._take_joined(number),
                ):
                    self._came(generated, engine.name)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
            finally:
                with self._changed:
                    self._count_work(number)
                    self._working[number] = self._ready[number] = False
                    ran, self._running[number] = self._running[number], {}
                    for id in {id for id, _ in ran}:
                        self._look_whether_complete(id)
                    self._changed.notify_all()

    def _attend(self, number: int) -> None:
        """In a thread of its own: what one engine is told while it works."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._is_behind(number) or (self._may_be_told(number) and self._new(number))
                )
                if self._closed:
                    return
                behind, weights = self._is_behind(number), self._weights
                self._attended.add(number)
            try:
                if behind:
                    self._update(number, weights)
                else:
                    self._join(number)
            except Exception as error:
                with self._changed:
                    self._error = self._error or error
                    self._interrupted[number].set()
            finally:
                with self._changed:
                    self._attended.discard(number)
                    self._changed.notify_all()

    def _may_be_told(self, number: int) -> bool:
        return self._ready[number] and not self._interrupted[number].is_set() and self._error is None

    def _is_behind(self, number: int) -> bool:
        return self._may_be_told(number) and version_of(self._serves[number]) != version_of(self._weights)

    def _new(self, number: int) -> list[SampleRequest]:
        return self._samples_of(number, besides={id for id, _ in self._running[number]})

    def _update(self, number: int, weights: Commit | None) -> None:
        """Have an engine go on with newer weights; what it had decoded until then is durable soon."""
        run, engine = self._run, self._run.fleet.rollout[number]
        if not run.fleet.updates_in_flight():
            with self._changed:
                self._interrupted[number].set()
            return
        with self._changed:
            self._serves[number] = weights
        seconds = update(run, engine, weights)
        parts = engine.retracted()
        with self._changed:
            self._usage.stall += seconds
            self._usage.interrupted_samples += len(parts)
            self._usage.recomputed_tokens += sum(len(part.response_ids) for part in parts)
            samples = []
            for part in parts:
                group, index, *_ = part.request_id
                request = self._running[number].get((group, index))
                if request is None or self._calls.records:
                    continue
                segment = Segment.sampled(part, FIRST_CALL, request.seed)
                if request.begun is not None:
                    self._usage.recomputed_tokens += len(request.begun)
                    segment = request.begun.then(segment)
                samples.append(GeneratedSample(*request.key, Trajectory((segment,)), FinishReason.ABORT))
            self._note(samples, engine.name)

    def _join(self, number: int) -> None:
        """Give an engine samples of new groups beside what it is at; where it takes none, it is interrupted."""
        with self._joining[number]:
            with self._changed:
                samples = self._new(number)
            if not samples:
                return
            if self._run.fleet.rollout[number].join(samples):
                self._joined[number] += samples
                with self._changed:
                    self._running[number] |= {sample.key: sample for sample in samples}
                    begun = [len(sample.begun) for sample in samples if sample.begun is not None]
                    self._usage.recomputed_tokens += sum(begun)
            else:
                with self._changed:
                    self._interrupted[number].set()
                    self._changed.notify_all()

    def _take_joined(self, number: int) -> list[SampleRequest]:
        with self._joining[number]:
            samples, self._joined[number] = self._joined[number], []
            return samples

    def _count_work(self, number: int) -> None:
        now = time.monotonic()
        if self._working[number]:
            self._usage.seconds += now - self._since[number]
            self._since[number] = now

    def _may_work(self, number: int) -> bool:
        ready = not self._pauses and number not in self._told and number not in self._attended
        return ready and self._error is None and not self._run.stopping.is_set()

    def _try_again(self) -> None:
        """After an error. A log that could not be written is begun anew, with all that is open."""
        self._error = None
        if self._log.broken or self._calls.broken:
            self._close_logs()
            self._log, calls = self._open_logs(self._open.keys())
            self._calls.begin_anew(calls)
            names = [engine.name for engine in self._run.fleet.rollout]
            for one in self._open.values():
                self._log.append(*((names[one.engine], one.group, part) for part in one.group.parts.values()))
        self._changed.notify_all()

    def _close_logs(self) -> None:
        self._calls.close()  # what it does at last is to write to the other
        if not self._log.broken:
            self._log.close()

    def _samples_of(self, number: int, besides: Collection[int] = ()) -> list[SampleRequest]:
        own = (one for id, one in self._open.items() if one.engine == number and id not in besides)
        groups = [one.group for one in own if not one.decided]
        return [sample for group in groups for sample in group.requests(besides=())]

    def _came(self, samples: Sequence[GeneratedSample], engine: str) -> None:
        """Some have ended, or were interrupted."""
        with self._changed:
            for sample in samples:
                one = self._open.get(sample.group_id)
                if one is None:  # it was taken
                    continue
                if sample.finish_reason == FinishReason.ABORT:
                    self._usage.interrupted_samples += 1
                self._running[one.engine].pop(sample.key, None)
            self._note(samples, engine)
            self._changed.notify_all()

    def _note(self, samples: Sequence[GeneratedSample], engine: str) -> None:
        """How far some have come."""
        rows = []
        for sample in samples:
            one = self._open.get(sample.group_id)
            if one is None:
                continue
            if len(sample.trajectory.segments) or sample.error is not None:
                rows.append((engine, one.group, sample))
            one = replace(one, group=replace(one.group, parts={**one.group.parts, sample.index: sample}))
            self._open[sample.group_id] = one
            self._look_whether_complete(sample.group_id)
        self._calls.after(partial(self._log.append, *rows))  # raises where the calls cannot be logged

    def _look_whether_complete(self, id: int) -> None:
        """A group is, when nothing of it is to be begun, nor is running: what a sample does when another one has
        failed is of its group, too."""
        one = self._open.get(id)
        if one is None or not one.decided or id in self._complete:
            return
        if not any(key[0] == id for key in self._running[one.engine]):
            self._complete.append(id)

    def _oldest_version(self, one: OpenGroup, least: int) -> int:
        """Of the weights that its tokens were sampled from; `least` where it has none."""
        sampled = None if one.versions is None else one.versions[0]
        recorded = self._calls.oldest_version(one.group.drawn.group_id)
        return min((version for version in (sampled, recorded) if version is not None), default=least)
