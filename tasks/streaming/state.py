"""State that the threads of a stream share: the open groups, the progress of their samples, and the samples in
flight."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from cairn.engines.types.trajectories import CallRecord, GeneratedSample, Origin, Recorded, SampleKey, SampleRequest
from cairn.storage.ledger.commits import Commit
from cairn.storage.logs.call_log import CallLog
from cairn.storage.logs.sample_log import SampleLog
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.calls import by_sample, call_records
from cairn.tasks.generation.episodes import LoggedCalls
from cairn.tasks.generation.groups import Group

# Log of the calls that the code of a stream's samples makes.


class StreamCalls(LoggedCalls):
    """Calls of the samples of one driver's stream. The driver logs them, and replays them whenever the code starts
    again, after an interruption or in the next driver, until a rollout step commits them with the samples."""

    def __init__(self, log: CallLog | None, origin: Origin) -> None:
        """Create the calls.

        Args:
            log: None where the samples' code records nothing.
            origin: that of its samples. The iteration is replaced by that of each group's admission.
        """
        super().__init__(log)
        self._origin = origin
        self._lock = threading.Lock()
        self._iterations: dict[int, int] = {}
        """Iteration that admitted each open group."""
        self._recorded: dict[SampleKey, list[CallRecord]] = {}
        self._oldest: dict[int, int] = {}
        if log is not None:
            self._add(call_records(log.recovered))

    @property
    def records(self) -> bool:
        """Whether there are calls to log."""
        return self._log is not None

    @property
    def broken(self) -> bool:
        """Whether the log is broken, so that nothing more becomes durable."""
        return self._log is not None and self._log.broken

    def admit(self, groups: Iterable[int], iteration: int) -> None:
        """Record that an iteration has admitted these groups."""
        self._iterations |= dict.fromkeys(groups, iteration)

    def begin_anew(self, log: CallLog | None) -> None:
        """Switch to another log, and write all known records to it."""
        self._log = log
        if log is not None:
            log.append(*(record for records in self._recorded.values() for record in records))

    def take(self, recorded: Recorded, acknowledge: Callable[[int], None]) -> None:
        """Log records that an engine sent: see `LoggedCalls.take`."""
        self._add(recorded.records)
        super().take(recorded, acknowledge)

    def of(self, groups: Collection[int]) -> list[CallRecord] | None:
        """Return all records of the samples of some groups, including intents; None where nothing is recorded."""
        if self._log is None:
            return None
        with self._lock:
            return [record for key, records in self._recorded.items() if key[0] in groups for record in records]

    def oldest_version(self, group: int) -> int | None:
        """Return the oldest weight version with which the policy responded to a group's samples; None without a
        response."""
        with self._lock:
            return self._oldest.get(group)

    def forget(self, groups: Iterable[int]) -> None:
        """Drop the records of these groups, which a commit now has."""
        gone = set(groups)
        with self._lock:
            self._recorded = {key: records for key, records in self._recorded.items() if key[0] not in gone}
            for id in gone:
                self._iterations.pop(id, None)
                self._oldest.pop(id, None)
        if self._log is not None:
            self._log.forget(gone)

    def close(self) -> None:
        """Return when everything taken is durable, and the callbacks that wait for it have run."""
        if self._log is not None and not self._log.broken:
            self._log.close()

    def _add(self, records: Sequence[CallRecord]) -> None:
        with self._lock:
            for key, own in by_sample(records).items():
                self._recorded.setdefault(key, []).extend(own)
            for record in records:
                if record.segment is not None and record.segment.weight_versions is not None and len(record.segment):
                    version = int(record.segment.weight_versions.min())
                    self._oldest[record.group_id] = min(self._oldest.get(record.group_id, version), version)

    def _with_logged_calls(self, sample: SampleRequest) -> SampleRequest:
        origin = replace(self._origin, iteration=self._iterations[sample.group_id])
        with self._lock:
            return replace(sample, origin=origin, recorded=tuple(self._recorded.get(sample.key, ())))


OpenLogs = Callable[[Collection[int]], tuple[SampleLog, CallLog | None]]
"""Function that opens the logs of some open groups: the log of samples and, where their code records calls, of
calls."""


@dataclass(frozen=True)
class OpenGroup:
    """Admitted group that no rollout step has taken."""

    group: Group
    """The group, with its samples as far as they came."""
    admission: Commit
    engine: int
    """Number of the engine that generates it. Another engine replaces one that has left."""
    recovered: bool = False
    """Whether an earlier driver completed it."""
    engines: Mapping[int, int] = field(default_factory=dict)
    """Number of the engine that generated each sample last, by sample index, if it was one of this driver's."""

    @cached_property
    def decided(self) -> bool:
        """Whether no sample of the group must be begun any more: all have ended, or one has failed."""
        failed = any(part.error is not None for part in self.group.parts.values())
        return failed or self.group.is_finished

    @cached_property
    def versions(self) -> tuple[int, int] | None:
        """Oldest and newest weight version of its tokens; None without tokens."""
        parts = [part.trajectory.weight_versions for part in self.group.parts.values() if part.trajectory.segments]
        sampled = [versions for versions in parts if len(versions)]
        return (min(int(v.min()) for v in sampled), max(int(v.max()) for v in sampled)) if sampled else None

    def engine_of(self, part: GeneratedSample) -> int:
        """Return the number of the engine that generated a sample of the group last."""
        return self.engines.get(part.index, self.engine)

    def with_part(self, part: GeneratedSample, engine: int) -> "OpenGroup":
        """Return the group with a sample as far as an engine brought it."""
        group = replace(self.group, parts={**self.group.parts, part.index: part})
        return replace(self, group=group, engines={**self.engines, part.index: engine})


@dataclass
class Usage:
    """Work of engines since it was last taken."""

    seconds: float = 0.0
    """Seconds of work, summed over engines."""
    interrupted_samples: int = 0
    """Number of times that an engine left a sample unfinished, to continue with other weights or with more samples."""
    recomputed_tokens: int = 0
    """Response tokens that engines prefilled again to resume after them."""
    stall: float = 0.0
    """Seconds without decoding because weights were replaced, summed over engines."""


class StreamState:
    """State of one driver's stream. Hold `changed` to read or change it, and notify the others after a change."""

    def __init__(self, call: StepCall, weights: Commit | None, open_logs: OpenLogs, groups: Collection[int]) -> None:
        """Create the state. `cairn.tasks.streaming.stream.Stream` explains the parameters."""
        self.changed = threading.Condition()
        self.weights = weights
        """Newest weights."""
        self.open: dict[int, OpenGroup] = {}
        """Open groups by id, in the order of their admission."""
        self.complete: list[int] = []
        """Ids of complete groups, in the order of their completion."""
        self.running: dict[int, dict[int, SampleRequest]] = {}
        """Samples in flight, by group and sample index. All samples in flight of a group are at one engine."""
        self.error: Exception | None = None
        """Error that the next `take` raises. Nothing begins until `take` is called again."""
        self.losses = 0
        """Engines lost since the last batch was taken, except those whose machines are known to be gone."""
        self.pauses = 0
        """Number of callers that need the engines for themselves."""
        self.closed = False
        self.usage = Usage()
        self._names = [engine.name for engine in call.run.fleet.rollout]
        self._open_logs = open_logs
        self._log, calls = open_logs(groups)
        manifest = call.run.ledger.manifest
        origin = Origin(manifest.identity, 0, attempt=call.attempt.name, created_at=manifest.created_at)
        self.calls = StreamCalls(calls, origin)

    def admit(self, admission: Commit, groups: Sequence[Group], serving: Collection[int]) -> None:
        """Open groups, and assign them to these engines."""
        self.calls.admit((group.prompt.group_id for group in groups), admission.iteration)
        loads = self._loads(serving)
        for group in groups:
            one = OpenGroup(group, admission, min(loads, key=loads.__getitem__, default=0))
            loads[one.engine] = loads.get(one.engine, 0) + 1
            self.open[group.prompt.group_id] = replace(one, recovered=one.decided)
            self.update_complete(group.prompt.group_id)
        self.changed.notify_all()

    def deal(self, serving: Collection[int]) -> None:
        """Assign open groups to these engines, about equally many to each. Groups of other engines move to them, and an
        engine with few groups gets some more, the newest first."""
        loads = self._loads(serving)
        if not loads:
            return
        groups = [(id, one) for id, one in reversed(self.open.items()) if not one.decided]
        for id, one in sorted(groups, key=lambda each: each[1].engine in loads):
            least = min(loads, key=loads.__getitem__)
            if one.engine not in loads or loads[one.engine] > loads[least] + 1:
                self.open[id] = replace(one, engine=least)
                loads[least] += 1
                if one.engine in loads:
                    loads[one.engine] -= 1
        self.changed.notify_all()

    def samples_of(self, number: int) -> list[SampleRequest]:
        """Return the samples that an engine must begin: unfinished ones of its groups without a sample in flight."""
        return [sample for one in self._waiting(number) for sample in one.group.requests(finished=())]

    def has_samples_for(self, number: int) -> bool:
        """Return whether there are samples that an engine must begin."""
        return any(True for _ in self._waiting(number))

    def begin(self, samples: Sequence[SampleRequest]) -> None:
        """Record that these samples are now in flight at an engine."""
        for sample in samples:
            self.running.setdefault(sample.group_id, {})[sample.index] = sample
            self.usage.recomputed_tokens += 0 if sample.begun is None else len(sample.begun)

    def end(self, group: int, index: int | None = None) -> None:
        """Record that a sample of a group, or by default none of its samples, is no longer in flight."""
        left = self.running.get(group, {})
        left.pop(index, None) if index is not None else left.clear()
        if not left:
            self.running.pop(group, None)
        self.update_complete(group)

    def note(self, samples: Sequence[GeneratedSample], number: int) -> None:
        """Record and log samples as far as an engine brought them."""
        rows = []
        for sample in samples:
            one = self.open.get(sample.group_id)
            if one is None:  # it was taken
                continue
            if len(sample.trajectory.segments) or sample.error is not None:
                rows.append((self._names[number], one.group, sample))
            self.open[sample.group_id] = one.with_part(sample, number)
            self.update_complete(sample.group_id)
        self.calls.after(partial(self._log.append, *rows))  # raises where the calls cannot be logged

    def update_complete(self, id: int) -> None:
        """Mark a group as complete if no sample of it must be begun or is in flight. Samples in flight count even when
        another one has failed, because their calls belong to the group too."""
        one = self.open.get(id)
        if one is not None and one.decided and id not in self.running and id not in self.complete:
            self.complete.append(id)

    def oldest_version(self, id: int, least: int) -> int:
        """Return the oldest weight version that a group's tokens were sampled from; `least` without tokens."""
        one = self.open[id]
        sampled = None if one.versions is None else one.versions[0]
        recorded = self.calls.oldest_version(id)
        return min((version for version in (sampled, recorded) if version is not None), default=least)

    def forget(self, ids: Collection[int]) -> None:
        """Drop these groups, which a commit now has."""
        for id in ids:
            self.open.pop(id, None)
        self.complete = [id for id in self.complete if id in self.open]
        if not (self._log.broken or self.calls.broken):
            self.calls.after(partial(self._log.forget, ids))
            self.calls.forget(ids)
        self.changed.notify_all()

    def resume(self) -> None:
        """Resume after an error. A log that could not be written is replaced by a new one with all open groups."""
        self.error = None
        if self._log.broken or self.calls.broken:
            self.close_logs()
            self._log, calls = self._open_logs(self.open.keys())
            self.calls.begin_anew(calls)
            for one in self.open.values():
                parts = one.group.parts.values()
                self._log.append(*((self._names[one.engine_of(part)], one.group, part) for part in parts))
        self.changed.notify_all()

    def close_logs(self) -> None:
        """Close the logs. All that they received is durable afterwards, where that is possible."""
        self.calls.close()  # its last callbacks write to the log of samples
        if not self._log.broken:
            self._log.close()

    def _waiting(self, number: int) -> Iterator[OpenGroup]:
        own = (one for id, one in self.open.items() if one.engine == number and id not in self.running)
        return (one for one in own if not one.decided)

    def _loads(self, serving: Collection[int]) -> dict[int, int]:
        """Return the number of undecided groups of each engine."""
        counted = Counter(one.engine for one in self.open.values() if not one.decided)
        return {number: counted[number] for number in serving}
