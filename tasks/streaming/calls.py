"""What the code of a stream's samples was given: logged by the driver, and given again whenever the code begins anew,
after an interruption or by the next driver, until a rollout step commits it with the samples."""

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from cairn.engines.episodes.records import CallRecord, Recorded
from cairn.engines.trajectories import Origin, SampleKey, SampleRequest
from cairn.storage.stream_calls import StreamCallLog
from cairn.tasks.calls import by_sample, call_records
from cairn.tasks.episodes import LoggedCalls


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
