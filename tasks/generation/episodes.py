"""Calls that the code of a step's samples makes: logged as they happen, and replayed when the code runs again."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Self

import pyarrow as pa

from cairn.engines.types.errors import EngineError
from cairn.engines.types.trajectories import NEVER, CallKind, CallRecord, Origin, Recorded, SampleKey, SampleRequest
from cairn.storage.ledger.commits import Step
from cairn.storage.logs.call_log import CallLog
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.calls import by_sample, call_records, call_table, read_calls
from cairn.tasks.generation.groups import row_segments


class LoggedCalls:
    """Calls of some samples, with a log if the samples' code records anything. Threads may share it."""

    def __init__(self, log: CallLog | None) -> None:
        self._log = log

    def with_logged_calls(self, samples: Iterable[SampleRequest]) -> list[SampleRequest]:
        """Return the samples with their logged calls."""
        return [self._with_logged_calls(sample) for sample in samples] if self._log is not None else list(samples)

    def _with_logged_calls(self, sample: SampleRequest) -> SampleRequest:
        raise NotImplementedError

    def take(self, recorded: Recorded, acknowledge: Callable[[int], None]) -> None:
        """Log records that an engine sent, and acknowledge them to the engine if it waits for that.

        If the log breaks before, the engine receives `NEVER`.
        """
        assert self._log is not None
        if not recorded.awaited:
            self._log.append(*recorded.records)
            return
        then, otherwise = (partial(_acknowledge, acknowledge, number) for number in (recorded.number, NEVER))
        self._log.append(*recorded.records, then=then, otherwise=otherwise, urgent=True)

    def require_intact(self) -> None:
        """Raise the error that stopped the log's writer, if there was one."""
        if self._log is not None:
            self._log.require_intact()

    def after(self, then: Callable[[], None]) -> None:
        """Call `then` when everything taken so far is durable."""
        if self._log is None:
            then()
        else:
            self._log.append(then=then)


class Calls(LoggedCalls):
    """Calls of the samples that a step generates. A context manager: enter it inside the context of the log of the
    step's finished samples."""

    def __init__(self, step: StepCall, *, records: bool, scope: str = "") -> None:
        """Open the log. `records`: whether the samples' code records anything. `scope`: see `Origin`."""
        manifest = step.run.ledger.manifest
        self._origin = Origin(manifest.identity, step.iteration, scope, step.attempt.name, manifest.created_at)
        self._replayed: list[CallRecord] | None = None
        """Calls of a committed step that runs again to be compared with its commit; None for other steps."""
        self._recorded: dict[SampleKey, list[CallRecord]] = {}
        log: CallLog | None = None
        if records:
            log = CallLog(step.attempt, step.input_digest, encode=call_table, earlier_digests=step.earlier_digests)
            committed = step.run.find(step.iteration, Step(step.attempt.step), step.shard)
            if committed is not None and (calls := step.run.calls(committed)) is not None:
                samples = step.run.read(committed).to_pylist() if committed.step is Step.ROLLOUT else []
                segments = {(row["group_id"], row["sample_index"]): row_segments(row) for row in samples}
                self._replayed = read_calls(*calls, segments)
            self._recorded = by_sample(call_records(log.recovered) if self._replayed is None else self._replayed)
        super().__init__(log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.__exit__(kind, error, trace)

    def _with_logged_calls(self, sample: SampleRequest) -> SampleRequest:
        logged = self._recorded.get(sample.key, ())
        if self._replayed is None:
            return replace(sample, origin=self._origin, recorded=(*sample.recorded, *logged))
        carried = {record.call for record in sample.recorded}
        resampled = {record.call for record in logged if record.kind is CallKind.SAMPLE} - carried
        return replace(sample, origin=self._origin, recorded=tuple(logged), resampled=frozenset(resampled))

    def table(self, carried: Sequence[CallRecord] = ()) -> pa.Table | None:
        """Return rows of CALLS: `carried`, those of earlier attempts, and those of this one, with or without a
        response. Returns when they are durable, and closes the log. None where nothing is recorded."""
        if self._log is None:
            return None
        appended = self._log.appended()
        before = list(carried)
        if self._replayed is not None:  # `carried` is part of it
            own = {(record.key, record.call) for record in carried}
            before = [one for one in self._replayed if one.kind is not CallKind.SAMPLE or (one.key, one.call) in own]
        return pa.concat_tables([call_table(before), self._log.recovered, appended])


def _acknowledge(acknowledge: Callable[[int], None], number: int) -> None:
    with suppress(EngineError):  # it died: nothing waits for the acknowledgement
        acknowledge(number)
