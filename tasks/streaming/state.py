"""What the threads of a stream share: the groups that are open, how far their samples have come, and who is at them."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from cairn.engines.types.trajectories import CallRecord, GeneratedSample, Origin, Recorded, SampleKey, SampleRequest
from cairn.storage.ledger.commits import Commit
from cairn.storage.logs.stream_log import StreamCallLog, StreamLog
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.calls import by_sample, call_records
from cairn.tasks.generation.episodes import LoggedCalls
from cairn.tasks.generation.groups import Group

# What the code of a stream's samples was given: logged by the driver, and given again whenever the code begins anew,
# after an interruption or by the next driver, until a rollout step commits it with the samples.


class StreamCalls(LoggedCalls):
    """Those of one driver."""

    def __init__(self, log: StreamCallLog | None, origin: Origin) -> None:
        """`log`: None where the samples' code records nothing. `origin`: of its samples, but for the iteration."""
        super().__init__(log)
        self._stream_log = log
        self._origin = origin
        self._lock = threading.Lock()
        self._iterations: dict[int, int] = {}
        """Of open groups, that which admitted them."""
        self._recorded: dict[SampleKey, list[CallRecord]] = {}
        self._oldest: dict[int, int] = {}
        if log is not None:
            self._add(call_records(log.recovered))

    @property
    def records(self) -> bool:
        """Whether there are any calls to log."""
        return self._stream_log is not None

    @property
    def broken(self) -> bool:
        """Whether nothing more becomes durable."""
        return self._stream_log is not None and self._stream_log.broken

    def admit(self, groups: Iterable[int], iteration: int) -> None:
        """An iteration has admitted these groups."""
        self._iterations |= dict.fromkeys(groups, iteration)

    def begin_anew(self, log: StreamCallLog | None) -> None:
        """Go on with another log, to which all is written that is known."""
        self._log = self._stream_log = log
        if log is not None:
            log.append(*(record for records in self._recorded.values() for record in records))

    def take(self, recorded: Recorded, acknowledge: Callable[[int], None]) -> None:
        """See `LoggedCalls.take`."""
        self._add(recorded.records)
        super().take(recorded, acknowledge)

    def of(self, groups: Collection[int]) -> list[CallRecord] | None:
        """All that the samples of some groups were given, and their intents; None where nothing is recorded."""
        if self._log is None:
            return None
        with self._lock:
            return [record for key, records in self._recorded.items() if key[0] in groups for record in records]

    def oldest_version(self, group: int) -> int | None:
        """Of the weights that the policy answered a group's samples with; None where it has not."""
        with self._lock:
            return self._oldest.get(group)

    def forget(self, groups: Iterable[int]) -> None:
        """A commit has these groups."""
        gone = set(groups)
        with self._lock:
            self._recorded = {key: records for key, records in self._recorded.items() if key[0] not in gone}
            for id in gone:
                self._iterations.pop(id, None)
                self._oldest.pop(id, None)
        if self._stream_log is not None:
            self._stream_log.forget(gone)

    def close(self) -> None:
        """Return when all that was taken is durable, and what was to be done after it is done."""
        if self._stream_log is not None and not self.broken:
            self._stream_log.close()

    def _add(self, records: Sequence[CallRecord]) -> None:
        with self._lock:
            for key, own in by_sample(records).items():
                self._recorded.setdefault(key, []).extend(own)
            for record in records:
                if record.segment is not None and record.segment.weight_versions is not None and len(record.segment):
                    version = int(record.segment.weight_versions.min())
                    self._oldest[record.group_id] = min(self._oldest.get(record.group_id, version), version)

    def _given(self, sample: SampleRequest) -> SampleRequest:
        origin = replace(self._origin, iteration=self._iterations[sample.group_id])
        with self._lock:
            return replace(sample, origin=origin, recorded=tuple(self._recorded.get(sample.key, ())))


OpenLogs = Callable[[Collection[int]], tuple[StreamLog, StreamCallLog | None]]
"""Begins the logs of some open groups: of samples and, where their code records calls, of these."""


@dataclass(frozen=True)
class OpenGroup:
    """One that is admitted, and that no rollout step has taken."""

    group: Group
    """With its samples as far as they came."""
    admission: Commit
    engine: int
    """Which generates it, by its number; another one where that has left."""
    recovered: bool = False
    """Whether an earlier driver completed it."""
    engines: Mapping[int, int] = field(default_factory=dict)
    """Which generated its samples last, by their indices, where it was one of this driver's."""

    @cached_property
    def decided(self) -> bool:
        """Whether nothing of it is to be begun any more: all of its samples have ended, or one has failed."""
        failed = any(part.error is not None for part in self.group.parts.values())
        return failed or self.group.is_finished

    @cached_property
    def versions(self) -> tuple[int, int] | None:
        """The oldest and the newest weight version of its tokens; None where it has none."""
        parts = [part.trajectory.weight_versions for part in self.group.parts.values() if part.trajectory.segments]
        found = [versions for versions in parts if len(versions)]
        return (min(int(v.min()) for v in found), max(int(v.max()) for v in found)) if found else None

    def engine_of(self, part: GeneratedSample) -> int:
        """Which generated a sample of it last."""
        return self.engines.get(part.index, self.engine)

    def with_part(self, part: GeneratedSample, engine: int) -> "OpenGroup":
        """The same with a sample as far as an engine brought it."""
        group = replace(self.group, parts={**self.group.parts, part.index: part})
        return replace(self, group=group, engines={**self.engines, part.index: engine})


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


class StreamState:
    """Of one driver. Whoever reads or changes it holds `changed`, and notifies the others then."""

    def __init__(self, call: StepCall, weights: Commit | None, open_logs: OpenLogs, groups: Collection[int]) -> None:
        """See `cairn.tasks.streaming.stream.Stream`."""
        self.changed = threading.Condition()
        self.weights = weights
        """The newest."""
        self.open: dict[int, OpenGroup] = {}
        """In the order of their admission."""
        self.complete: list[int] = []
        """In the order in which they came."""
        self.running: dict[int, dict[int, SampleRequest]] = {}
        """Of groups, each with one engine, the samples that this is at, by their indices."""
        self.error: Exception | None = None
        """What the next `take` raises; nothing begins until that is called again."""
        self.losses = 0
        """Engines that were lost since the last batch was taken, but for those whose machines are known to be gone."""
        self.pauses = 0
        """How many want to have the engines to themselves."""
        self.closed = False
        self.usage = Usage()
        self._names = [engine.name for engine in call.run.fleet.rollout]
        self._open_logs = open_logs
        self._log, calls = open_logs(groups)
        manifest = call.run.ledger.manifest
        origin = Origin(manifest.identity, 0, attempt=call.attempt.name, created_at=manifest.created_at)
        self.calls = StreamCalls(calls, origin)

    def admit(self, admission: Commit, groups: Sequence[Group], serving: Collection[int]) -> None:
        """Open groups, to be generated by these engines."""
        self.calls.admit((group.drawn.group_id for group in groups), admission.iteration)
        loads = self._loads(serving)
        for group in groups:
            one = OpenGroup(group, admission, min(loads, key=loads.__getitem__, default=0))
            loads[one.engine] = loads.get(one.engine, 0) + 1
            self.open[group.drawn.group_id] = replace(one, recovered=one.decided)
            self.look_whether_complete(group.drawn.group_id)
        self.changed.notify_all()

    def deal(self, serving: Collection[int]) -> None:
        """Have open groups generated by these engines, about as many by each: those of others go on with them, and one
        that has few gets some, the newest ones."""
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
        """What an engine is to begin: unfinished samples of its groups that none is at."""
        return [sample for one in self._waiting(number) for sample in one.group.requests(besides=())]

    def has_samples_for(self, number: int) -> bool:
        """Whether there are any."""
        return any(True for _ in self._waiting(number))

    def begin(self, samples: Sequence[SampleRequest]) -> None:
        """An engine is at these from now on."""
        for sample in samples:
            self.running.setdefault(sample.group_id, {})[sample.index] = sample
            self.usage.recomputed_tokens += 0 if sample.begun is None else len(sample.begun)

    def end(self, group: int, index: int | None = None) -> None:
        """It is at a sample of a group no more, or at none of them."""
        left = self.running.get(group, {})
        left.pop(index, None) if index is not None else left.clear()
        if not left:
            self.running.pop(group, None)
        self.look_whether_complete(group)

    def note(self, samples: Sequence[GeneratedSample], number: int) -> None:
        """How far an engine has brought some."""
        rows = []
        for sample in samples:
            one = self.open.get(sample.group_id)
            if one is None:  # it was taken
                continue
            if len(sample.trajectory.segments) or sample.error is not None:
                rows.append((self._names[number], one.group, sample))
            self.open[sample.group_id] = one.with_part(sample, number)
            self.look_whether_complete(sample.group_id)
        self.calls.after(partial(self._log.append, *rows))  # raises where the calls cannot be logged

    def look_whether_complete(self, id: int) -> None:
        """A group is, when nothing of it is to be begun, nor is running: what a sample does when another one has
        failed is of its group, too."""
        one = self.open.get(id)
        if one is not None and one.decided and id not in self.running and id not in self.complete:
            self.complete.append(id)

    def oldest_version(self, id: int, least: int) -> int:
        """Of the weights that a group's tokens were sampled from; `least` where it has none."""
        one = self.open[id]
        sampled = None if one.versions is None else one.versions[0]
        recorded = self.calls.oldest_version(id)
        return min((version for version in (sampled, recorded) if version is not None), default=least)

    def forget(self, ids: Collection[int]) -> None:
        """A commit has these groups."""
        for id in ids:
            self.open.pop(id, None)
        self.complete = [id for id in self.complete if id in self.open]
        if not (self._log.broken or self.calls.broken):
            self.calls.after(partial(self._log.forget, ids))
            self.calls.forget(ids)
        self.changed.notify_all()

    def try_again(self) -> None:
        """After an error. A log that could not be written is begun anew, with all that is open."""
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
        """What has come is durable then, where it can be."""
        self.calls.close()  # what it does at last is to write to the other
        if not self._log.broken:
            self._log.close()

    def _waiting(self, number: int) -> Iterator[OpenGroup]:
        own = (one for id, one in self.open.items() if one.engine == number and id not in self.running)
        return (one for one in own if not one.decided)

    def _loads(self, serving: Collection[int]) -> dict[int, int]:
        """Undecided groups of engines."""
        counted = Counter(one.engine for one in self.open.values() if not one.decided)
        return {number: counted[number] for number in serving}
