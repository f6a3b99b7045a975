"""Generation of whole groups, so arranged that a prompt fails by what the engine says of it, and by nothing else.

| what happens while a group is generated | what becomes of it |
|---|---|
| the engine refuses the prompt | it fails, at once |
| the engine, alive, fails on it in company | the step is tried again; after `TOGETHER` such tries it is a suspect |
| the engine, alive, fails on a suspect, which is generated alone | the same; after `ALONE` such tries it fails |
| the engine dies, is silent or out of reach, is aborted, loses samples, holds other weights | the step is tried again |

Only what the engine says of a prompt counts against it. Anything else leaves the group as it was: the step is tried
again as often as `retry` says, and then the run ends with the error, to be resumed. Where an engine was lost time after
time, the error names the prompts that were there each time (`cairn.tasks.casualties`).

All samples of a failed group carry the error and no token: they are graded by nobody, and the filter drops the group
and asks for another. A suspect whose engine did not fail is a group like any other. So processes, machines and networks
may fail as they like: the groups that are trained on stay those of a run in which nothing fails.

Where only some of the groups are needed, the others are aborted as soon as these have been generated, and come as far
as they are. Every token must be of the weights that the step wants: an engine that serves others is an error.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from cairn.engines.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed, RequestRefused
from cairn.engines.types import Completion, FinishReason, GenerateRequest
from cairn.storage.commits import Commit
from cairn.storage.layout import commit_name
from cairn.tasks.recovery import version_of
from cairn.tasks.step import StepCall
from cairn.tasks.sync import bring_up_to_date


class Engine(Protocol):
    """Of a rollout engine, or of what stands for it in the driver, what generation needs."""

    name: str

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """See `cairn.engines.rollout.base.RolloutEngine`."""

    def abort(self) -> None:
        """See `cairn.engines.rollout.base.RolloutEngine`; from the thread that reads the stream."""


TOGETHER = 2
"""Failures of the engine itself, in company, after which a group is a suspect."""
ALONE = 2
"""Failures of the engine itself after which it fails, alone. With three new tries of a step (`retry`) that is one
driver's last."""


class _Quota:
    """Counts down the groups that are still needed."""

    def __init__(self, groups: int | None) -> None:
        """None: all of them."""
        self._left = groups

    @property
    def is_met(self) -> bool:
        return self._left is not None and self._left <= 0

    def count(self, group: Sequence[Completion]) -> None:
        """Take a group off, unless it is unfinished."""
        if self._left is not None and all(sample.finish_reason != FinishReason.ABORT for sample in group):
            self._left -= 1


def generate_groups(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    requests: Sequence[GenerateRequest],
    *,
    rows: Mapping[int, int],
    enough: int | None = None,
) -> Iterator[list[Completion]]:
    """Generate every sample with the weights that `weights` left; yield each group's completions, by their ids, when
    the last of them has ended. Raises EngineError where a new try of the step may help. `rows`: of the data, by the
    group's id, from 0.

    After `enough` groups that did not fail, the others are aborted: their samples are yielded as far as they came.
    """
    quota = _Quota(enough)
    failures, casualties = step.run.failed_generations, step.run.casualties
    groups = _grouped(requests)
    suspects = {id: group for id, group in groups.items() if failures[_key(step, id)] >= TOGETHER}
    others = [request for request in requests if _group(request) not in suspects]
    try:
        yield from _together(step, engine, weights, others[:: -1 if casualties.times(step) % 2 else 1], quota)
        for id, group in suspects.items():
            yield from _alone(step, engine, weights, id, group, quota)
    except (EngineDied, EngineTimeout) as error:
        raise type(error)(casualties.told(step, error, rows)) from error


def _together(
    step: StepCall, engine: Engine, weights: Commit | None, requests: Sequence[GenerateRequest], quota: _Quota
) -> Iterator[list[Completion]]:
    unfinished = _grouped(requests)
    if not requests or quota.is_met:
        yield from map(_unbegun, unfinished.values())
        return
    finished: dict[int, list[Completion]] = {id: [] for id in unfinished}
    aborted = False
    try:
        for completions in engine.generate(requests):
            for completion in completions:
                _check(engine, completion, version_of(weights), may_abort=aborted)
                id = _group(completion)
                group = finished[id]
                group.append(completion)
                if len(group) == len(unfinished[id]):
                    del unfinished[id]
                    quota.count(group)
                    yield sorted(group, key=lambda sample: sample.request_id)
            if quota.is_met and unfinished and not aborted:
                aborted = True
                engine.abort()
        if unfinished:
            lost = ", ".join(f"{len(finished[id])} of {len(group)} for {id}" for id, group in unfinished.items())
            raise EngineError(f"{engine.name} gave fewer samples than asked: {lost}")
    except RequestRefused as refusal:
        reasons = {id: why for (id, *_), why in refusal.refused.items()}
        for id, why in reasons.items():
            yield _failed(unfinished.pop(id), why)
        left = [request for group in unfinished.values() for request in group]
        yield from _together(step, engine, weights, left, quota)
    except GenerationFailed:
        step.run.failed_generations.update(_key(step, id) for id in unfinished)
        raise
    except (EngineDied, EngineTimeout):
        step.run.casualties.add(step, unfinished)
        raise


def _alone(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    id: int,
    group: Sequence[GenerateRequest],
    quota: _Quota,
) -> Iterator[list[Completion]]:
    with step.run.weights_lock:  # one suspect at a time, so that each answers for its own failures
        bring_up_to_date(step.run, weights)
        try:
            groups = list(_together(step, engine, weights, group, quota))
        except GenerationFailed as error:
            if step.run.failed_generations[_key(step, id)] < TOGETHER + ALONE:
                raise
            groups = [_failed(group, f"{type(error).__name__}: {error}")]
            bring_up_to_date(step.run, weights)
    yield from groups


def _check(engine: Engine, completion: Completion, version: int, *, may_abort: bool) -> None:
    """Raise EngineError for a sample of other weights, or one that was aborted by somebody else."""
    others = sorted(set(completion.weight_versions.tolist()) - {version})
    if others:
        raise EngineError(f"{engine.name} sampled with the weights of version {others[0]}, not {version}")
    if completion.finish_reason == FinishReason.ABORT and not may_abort:
        raise EngineError(f"{engine.name} gave up a sample of group {_group(completion)}, which nobody had aborted")


def _group(one: GenerateRequest | Completion) -> int:
    return one.request_id[0]


def _grouped(requests: Sequence[GenerateRequest]) -> dict[int, list[GenerateRequest]]:
    """By the id of their group."""
    groups: dict[int, list[GenerateRequest]] = {}
    for request in requests:
        groups.setdefault(_group(request), []).append(request)
    return groups


def _unbegun(group: Sequence[GenerateRequest]) -> list[Completion]:
    return [Completion.empty(request.request_id, FinishReason.ABORT) for request in group]


def _failed(group: Sequence[GenerateRequest], why: str) -> list[Completion]:
    return [Completion.empty(request.request_id, FinishReason.ERROR, why) for request in group]


def _key(step: StepCall, group_id: int) -> tuple[str, int]:
    return commit_name(step.iteration, step.attempt.step, step.shard), group_id
