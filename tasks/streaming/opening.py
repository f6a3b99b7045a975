"""Opening of a driver's stream, from the state that the ledger and the logs of earlier drivers left."""

import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.logs.call_log import CallLog
from cairn.storage.logs.sample_log import SampleLog
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import StepCall
from cairn.tasks.generation.calls import call_table
from cairn.tasks.generation.generation import generate_function
from cairn.tasks.generation.groups import RowFormat, sample_parts
from cairn.tasks.halves import newest_sampled, newest_trained, oldest_open, weights_after
from cairn.tasks.streaming.stream import Stream, admission_number, admitted_groups, admitted_ids
from cairn.tasks.streaming.take import encode_rows, take_groups


@contextmanager
def open_stream(run: RunContext) -> Iterator[None]:
    """Generate samples of a run continuously within the block."""
    ledger, iteration = run.ledger, oldest_open(run.ledger)
    attempt, circumstances = ledger.attempt(iteration, Step.ROLLOUT, "stream"), take_groups.circumstances(run)

    recovered: list[pa.Table] = []

    def open_logs(groups: Collection[int]) -> tuple[SampleLog, CallLog | None]:
        name = layout.attempt_name(None, layout.attempt_epoch(attempt.name), uuid.uuid4().hex[:12])
        folder = AttemptFolder(ledger.store, layout.stream(ledger.run), name, root=layout.run(ledger.run))
        earlier = take_groups.earlier_circumstances(run)
        samples = SampleLog(
            folder,
            circumstances,
            schema=RowFormat.of(run).schema({}),
            encode=partial(encode_rows, run),
            earlier_digests=earlier,
            groups=groups,
        )
        if not recovered:  # before calls are read: see `SampleLog.recover`
            recovered.append(samples.recover())
        if not generate_function(run).records:
            return samples, None
        return samples, CallLog(folder, circumstances, encode=call_table, earlier_digests=earlier, groups=groups)

    call = StepCall(run, iteration, "stream", attempt, circumstances)
    newest, left = open_groups(run)
    open_ids = {id for _, ids in left for id in ids}
    sampled = newest_sampled(run.config.rollout, newest_trained(run))
    stream = Stream(call, weights_after(run, sampled), open_logs, open_ids)
    try:
        rows = _rows_by_group(recovered[0])
        for admission, ids in left:
            groups = (group for group in admitted_groups(run, admission) if group.prompt.group_id in ids)
            parts = ((group, sample_parts(rows.get(group.prompt.group_id, []))) for group in groups)
            stream.admit(admission, [replace(group, parts=own) for group, own in parts])
        if newest is not None:
            stream.admit(newest, [])
        stream.begin()
        run.attach(stream)
        yield
    finally:
        run.detach(Stream)
        stream.close()


def open_groups(run: RunContext) -> tuple[Commit | None, list[tuple[Commit, list[int]]]]:
    """Return the newest admission of a run, and for each admission the groups that no rollout step has taken, in the
    order of admission."""
    ledger = run.ledger
    last, first = ledger.last_iteration(), ledger.first_iteration
    admitted = dict[str, Commit]()
    newest: Commit | None = None
    left: dict[str, list[int]] = {}
    for iteration in range(-1 if last is None else last, first - 1, -1):
        commits = ledger.commits(iteration)
        admitted |= {commit.name: commit for commit in commits if commit.step is Step.ADMIT}
        takes = [commit for commit in commits if commit.step is Step.ROLLOUT]
        if takes:  # the last of its rounds: what was admitted after it belongs to this iteration or a later one
            take = max(takes, key=lambda commit: int((commit.shard or "0").partition("-")[0]))
            newest = run.input_commit(take, str(take.values["admitted"]))
            still = take.values["open"]
            assert isinstance(still, dict)
            left = {name: list(ids) for name, ids in still.items()}  # type: ignore[arg-type]
            break
    number = -1 if newest is None else admission_number(newest)
    later = [one for one in admitted.values() if admission_number(one) > number]
    left |= {one.name: admitted_ids(one) for one in later}
    admissions = {name: admitted.get(name) or _committed(run, name) for name in left}
    ordered = sorted(left, key=lambda name: admission_number(admissions[name]))
    newest = max([*later, *([newest] if newest else [])], key=admission_number, default=None)
    return newest, [(admissions[name], left[name]) for name in ordered]


def _committed(run: RunContext, name: str) -> Commit:
    iteration, _, rest = name.partition("/")
    return run.committed(int(iteration), Step.ADMIT, rest.partition(".")[2])


def _rows_by_group(rows: pa.Table) -> dict[int, list[dict[str, object]]]:
    """Return rows of the rollout table by group."""
    by_group: dict[int, list[dict[str, object]]] = {}
    for row in rows.to_pylist():
        by_group.setdefault(row["group_id"], []).append(row)
    return by_group
