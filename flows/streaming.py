"""The halves of an iteration of a streaming run. They exchange samples through the stream (`cairn.tasks.streaming`).

    admit     prompts for the stream                             needs all of i-1-max_age, and demand for more prompts
    collect   rollout (takes complete groups) → reward → filter  needs filter of i-1
    learn     the same for every run                             needs train of i-1, filter of i

Groups that the filter drops are replaced: an iteration admits as many further prompts as its batch lacks groups.
"""

import itertools
from contextlib import nullcontext

from cairn.flows.step_runner import StepRunner
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.logs.admissions import claim_admission
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.quarantine import skipped_prompts
from cairn.tasks.durable.selection import last_selection, number
from cairn.tasks.grading.reward import reward
from cairn.tasks.selecting.filter import filter_groups
from cairn.tasks.streaming.stream import Stream, admission_number, admit, admitted_groups
from cairn.tasks.streaming.take import take_groups, taken_ids


def admit_prompts(run: RunContext, steps: StepRunner, index: int) -> Commit:
    """Admit the prompts that an iteration adds to the stream."""
    return _admit(run, steps, index, 0, run.config.rollout.rollout_batch_size)


def collect_from_stream(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
    """Take and select the batch of an iteration: rounds of rollout, reward and filter until it is full."""
    previous = last_selection(run, index - 1) if index else None
    taken: list[Commit] = []
    graded: list[Commit] = []
    admitted: list[Commit] = []
    selection = previous
    missing = run.config.rollout.rollout_batch_size
    for round in itertools.count():
        shard = f"{round:02d}-000"
        if round:
            admitted.append(_admit(run, steps, index, round, missing))
        before = [selection] if selection else []
        taken.append(steps.call(take_groups, index, shard, before, count=missing))
        if (stream := run.attached(Stream)) is not None:
            stream.forget(taken_ids(taken[-1]), index)
        graded.append(steps.call(reward, index, shard, taken[-1]))
        selection = steps.call(filter_groups, index, f"{round:02d}", previous, taken, graded, round=round)
        if selection.values["full"]:
            return [*admitted, *taken, *graded, selection]
        missing = number(selection, "missing")
    raise AssertionError("unreachable")


def _admit(run: RunContext, steps: StepRunner, index: int, round: int, count: int) -> Commit:
    """Admit `count` prompts and return the commit.

    Admissions of all iterations are serialized. An admission that an earlier driver had claimed is completed first.
    """
    shard, stream = f"{round:02d}", run.attached(Stream)
    with stream.admitting if stream is not None else nullcontext():
        done = run.find(index, Step.ADMIT, shard)
        if done is not None:
            return _adopt(run, steps, done, count)
        if stream is None:  # a reader without engines
            return steps.call(admit, index, shard, None, count=count)
        admission = None
        while admission is None or (admission.iteration, admission.shard) != (index, shard):
            previous = stream.newest_admission
            number = 0 if previous is None else admission_number(previous) + 1
            without = skipped_prompts(run.ledger, index)
            claim = claim_admission(run.ledger, number, iteration=index, shard=shard, count=count, without=without)
            place = {"count": claim.count, "without": list(claim.without) or None}
            admission = steps.call(admit, claim.iteration, claim.shard, previous, **place)
            stream.admit(admission, admitted_groups(run, admission))
        return admission


def _adopt(run: RunContext, steps: StepRunner, done: Commit, count: int) -> Commit:
    """Adopt a committed admission.

    Its predecessor and the rows that it passed over depended on timing, so both are taken from the commit.
    """
    before = next((name for name in done.inputs if "/" in name), None)
    previous = None if before is None else run.input_commit(done, before)
    without = done.values["without"] or None
    admission = steps.call(admit, done.iteration, done.shard, previous, count=count, without=without)
    stream = run.attached(Stream)
    if stream is not None and stream.follows(admission):  # a late admission of another driver may not follow
        stream.admit(admission, admitted_groups(run, admission))
    return admission
