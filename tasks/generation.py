"""Generation of samples, so arranged that a prompt fails by what the engine says of it, and by nothing else.

| what happens while a group is generated | what becomes of it |
|---|---|
| the engine refuses the prompt | it fails, at once |
| the engine, alive, fails on it in company | the step is tried again; after `TOGETHER` such tries it is a suspect |
| the engine, alive, fails on a suspect, which is generated alone | the same; after `ALONE` such tries it fails |
| the engine dies, is silent or out of reach, is aborted, loses samples, holds other weights | the step is tried again |

Only what the engine says of a prompt counts against it. Anything else leaves the group as it was: the step is tried
again as often as `retry` says, and then the run ends with the error, to be resumed. Where an engine was lost time after
time, the error names the prompts that were there each time (`cairn.tasks.casualties`).

A sample that failed carries the error and no token, and its group fails with it: it is graded by nobody, and the filter
drops the group and asks for another. A suspect whose engine did not fail is a group like any other. So processes,
machines and networks may fail as they like: the groups that are trained on stay those of a run in which nothing fails.

Where only some of the groups are needed, the others are aborted as soon as these have been generated, and come as far
as they are; or each sample is cut off after so many tokens of its own (`cairn.tasks.cutting`). Every token must be of
the weights that the step wants: an engine that serves others is an error.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from cairn.configs.plugins import BadPlugin
from cairn.engines.episodes.options import EpisodeOptions
from cairn.engines.episodes.records import Recorded
from cairn.engines.episodes.user_code import SINGLE_TURN, GenerateFunction
from cairn.engines.errors import EngineDied, EngineError, EngineTimeout, GenerationFailed
from cairn.engines.trajectories import FIRST_CALL, GeneratedSample, SampleRequest
from cairn.engines.types import FinishReason, SamplingParams
from cairn.storage.commits import Commit
from cairn.storage.layout import commit_name
from cairn.tasks.context import RunContext
from cairn.tasks.episodes import LoggedCalls
from cairn.tasks.plugin_sources import digest_of_all, source_digest
from cairn.tasks.step import StepCall
from cairn.tasks.sync import serve
from cairn.tasks.versions import version_of


class Engine(Protocol):
    """Of a rollout engine, or of what stands for it in the driver, what generation needs."""

    name: str

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """See `cairn.engines.episodes.samples.SampleEngine`."""

    def acknowledge(self, number: int) -> None:
        """The same; from any thread."""

    def abort(self) -> None:
        """The same; from the thread that reads the stream."""


TOGETHER = 2
"""Failures of the engine itself, in company, after which a group is a suspect."""
ALONE = 2
"""Failures of the engine itself after which it fails, alone. With three new tries of a step (`retry`) that is one
driver's last."""


class _Unfinished:
    """The samples that an engine has not given back yet, by group; and how many groups are still needed."""

    def __init__(self, needed: int | None) -> None:
        """`needed`: groups; None: all of them."""
        self._needed = needed
        self._left: dict[int, set[int]] = defaultdict(set)
        self._spoilt: set[int] = set()

    def add(self, samples: Sequence[SampleRequest]) -> None:
        """Samples that are asked for."""
        for sample in samples:
            self._left[sample.group_id].add(sample.index)

    def take(self, sample: GeneratedSample) -> None:
        """One has come. A group that is finished, and did not fail, is no longer needed."""
        left = self._left[sample.group_id]
        left.remove(sample.index)
        if sample.error is not None or sample.finish_reason == FinishReason.ABORT:
            self._spoilt.add(sample.group_id)
        if not left:
            del self._left[sample.group_id]
            if self._needed is not None and sample.group_id not in self._spoilt:
                self._needed -= 1

    def give_up(self, group_id: int) -> None:
        """None of a group is to come any more."""
        self._left.pop(group_id, None)

    @property
    def is_enough(self) -> bool:
        """Whether no group is needed any more."""
        return self._needed is not None and self._needed <= 0

    @property
    def groups(self) -> dict[int, set[int]]:
        """Indices of the samples that have not come, by group."""
        return {group_id: left for group_id, left in self._left.items() if left}


def generate_samples(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    rows: Mapping[int, int],
    calls: LoggedCalls,
    enough: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    newest: Callable[[], Commit | None] | None = None,
    joined: Callable[[], Sequence[SampleRequest]] = lambda: (),
) -> Iterator[list[GeneratedSample]]:
    """Generate samples with the weights that `weights` left; yield each as it ends. Raises EngineError where a new try
    of the step may help. `rows`: of the data, by the group's id, from 0. `calls` logs those of the samples, and has
    what an earlier attempt logged of them.

    After `enough` groups that did not fail, the others are aborted: their samples are yielded as far as they came. So
    they are where somebody else aborts what the engine generates, while `interrupted` is true.

    `newest`: what the engine was brought to meanwhile, where somebody does that while it generates. `joined`: the
    samples that it was given to generate beside these, since the last time.
    """
    brought = newest or (lambda: weights)
    failures, casualties = step.run.failed_generations, step.run.casualties
    unfinished = _Unfinished(enough)
    groups: dict[int, list[SampleRequest]] = defaultdict(list)
    for sample in calls.given(samples):
        groups[sample.group_id].append(sample)
    for id in list(groups):
        if (error := casualties.blamed(step, id)) is not None:
            yield [GeneratedSample.failed(sample, error) for sample in groups.pop(id)]
    suspects = [id for id in groups if failures[_key(step, id)] >= TOGETHER]
    others = [sample for id, group in groups.items() if id not in suspects for sample in group]
    try:
        in_turn = others[:: -1 if casualties.times(step) % 2 else 1]
        how = (params, unfinished, calls, interrupted, joined)
        yield from _together(step, engine, weights, brought, in_turn, *how)
        for id in suspects:
            yield from _alone(step, engine, brought, groups[id], *how)
    except (EngineDied, EngineTimeout) as error:
        raise type(error)(casualties.told(step, error, rows)) from error


def _together(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    brought: Callable[[], Commit | None],
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    unfinished: _Unfinished,
    calls: LoggedCalls,
    interrupted: Callable[[], bool],
    joined: Callable[[], Sequence[SampleRequest]],
) -> Iterator[list[GeneratedSample]]:
    if not samples or unfinished.is_enough or interrupted():
        yield [GeneratedSample.aborted(sample) for sample in samples]
        return
    asked = {sample.key: sample for sample in samples}
    unfinished.add(samples)
    aborted = False

    def take_joined() -> None:
        others = joined()
        unfinished.add(others)
        asked.update({sample.key: sample for sample in others})

    try:
        for told in engine.generate_samples(samples, params, generate_function(step.run)):
            if isinstance(told, Recorded):
                calls.take(told, engine.acknowledge)
                continue
            calls.require_intact()
            take_joined()
            generated = [_usable(step.run, asked[sample.key], sample) for sample in told]
            may_abort = aborted or interrupted()
            for sample in generated:
                versions = version_of(weights), version_of(brought())
                _check(engine, asked[sample.key], sample, versions, may_abort=may_abort)
                unfinished.take(sample)
            yield generated
            if unfinished.is_enough and unfinished.groups and not aborted:
                aborted = True
                engine.abort()
        take_joined()
        generate_function(step.run)  # read before and after: so it is what was run
        if unfinished.groups:
            lost = ", ".join(f"{sorted(indices)} of group {id}" for id, indices in unfinished.groups.items())
            raise EngineError(f"{engine.name} gave fewer samples than asked: without {lost}")
    except GenerationFailed:
        step.run.failed_generations.update(_key(step, id) for id in unfinished.groups)
        raise
    except (EngineDied, EngineTimeout) as error:
        step.run.casualties.add(step, unfinished.groups, hung=isinstance(error, EngineTimeout))
        raise


def _alone(
    step: StepCall,
    engine: Engine,
    brought: Callable[[], Commit | None],
    group: Sequence[SampleRequest],
    params: SamplingParams,
    unfinished: _Unfinished,
    calls: LoggedCalls,
    interrupted: Callable[[], bool],
    joined: Callable[[], Sequence[SampleRequest]],
) -> Iterator[list[GeneratedSample]]:
    with step.run.suspects_lock:  # one suspect at a time, so that each answers for its own failures
        weights = brought()
        serve(step.run, engine, weights)
        how = (params, unfinished, calls, interrupted, joined)
        try:
            generated = list(_together(step, engine, weights, brought, group, *how))
        except GenerationFailed as error:
            if step.run.failed_generations[_key(step, group[0].group_id)] < TOGETHER + ALONE:
                raise
            generated = [[GeneratedSample.failed(sample, f"{type(error).__name__}: {error}") for sample in group]]
            unfinished.give_up(group[0].group_id)
            serve(step.run, engine, brought())
    yield from generated


def generate_function(run: RunContext) -> GenerateFunction:
    """What a sample goes through, for engines. Raises BadPlugin where the user's code is not what the run recorded."""
    option = "rollout.custom_generate_function_path"
    name = run.config.rollout.custom_generate_function_path
    if name == SINGLE_TURN:
        return GenerateFunction(name)
    if "." in name and source_digest(name) != run.ledger.terms.plugin_digest(option):
        raise BadPlugin(
            f"the source of {name} was changed while the run used it: undo the change and `cairn resume`, or "
            "`cairn fork` to go on with it"
        )
    file, separator, function = name.rpartition(":")
    if separator and file.endswith(".py"):
        name = f"{Path(file).expanduser().resolve()}:{function}"
    _require_recorded_tools(run)
    rollout = run.config.rollout
    return GenerateFunction(
        name,
        tuple(map(os.path.abspath, sys.path)),
        os.path.abspath(run.config.model.path),
        rollout.custom_generate_timeout,
        rollout.episode_timeout,
        EpisodeOptions.of(rollout),
    )


def _require_recorded_tools(run: RunContext) -> None:
    """Raise BadPlugin where the user's tools are not what the run recorded."""
    paths = [name for name in run.config.rollout.tools if "." in name]
    if paths and digest_of_all(map(source_digest, paths)) != run.ledger.terms.plugin_digest("rollout.tools"):
        raise BadPlugin(
            f"the source of {' or '.join(paths)} was changed while the run used it: undo the change and "
            "`cairn resume`, or `cairn fork` to go on with it"
        )


def _check(
    engine: Engine, request: SampleRequest, sample: GeneratedSample, versions: tuple[int, int], *, may_abort: bool
) -> None:
    """Raise EngineError for a sample of weights that are older or newer than those, or one that was aborted by somebody
    else and not cut off."""
    carried = 0 if request.begun is None else len(request.begun)
    given = {record.call for record in request.recorded}
    sampled = set[int]()
    for segment in sample.trajectory.segments:
        if segment.weight_versions is not None and segment.call not in given:
            sampled |= {*segment.weight_versions[carried if segment.call == FIRST_CALL else 0 :].tolist()}
    first, last = versions
    others = sorted(version for version in sampled if not first <= version <= last)
    if others:
        wanted = first if first == last else f"{first} to {last}"
        raise EngineError(f"{engine.name} sampled with the weights of version {others[0]}, not {wanted}")
    was_cut = request.cut_at is not None and len(sample.trajectory.response_ids) == request.cut_at
    if sample.finish_reason == FinishReason.ABORT and not (may_abort or was_cut):
        raise EngineError(f"{engine.name} gave up a sample of group {sample.group_id}, which nobody had aborted")


def _usable(run: RunContext, request: SampleRequest, sample: GeneratedSample) -> GeneratedSample:
    """The sample; failed, where the world gave it tokens after a trajectory's last call, which no engine has seen, that
    the model cannot take: it would be trained on as it is for ever."""
    for trajectory in sample.trajectories:
        if not trajectory.segments or trajectory.segments[-1].call is not None:
            continue
        context, vocabulary = _limits(run.config.model.path)
        ids = trajectory.response_ids
        outside = ids[(ids < 0) | (ids >= vocabulary)]
        prompt = request.prompt_ids if trajectory.prompt_ids is None else trajectory.prompt_ids
        length = len(prompt) + len(ids)
        if len(outside):
            return GeneratedSample.failed(
                request, f"generate gave it token {outside[0]}, outside the model's vocabulary of {vocabulary}"
            )
        if length > context:
            return GeneratedSample.failed(
                request, f"generate made it {length} tokens long, more than the model's context of {context}"
            )
    return sample


@cache
def _limits(model: str) -> tuple[int, int]:
    """Longest sequence and number of token ids of a model."""
    from cairn.engines.models import check_model_folder, context_length  # PyTorch takes seconds to import

    config = check_model_folder(model)
    return context_length(config), config.get_text_config().vocab_size


def _key(step: StepCall, group_id: int) -> tuple[str, int]:
    return commit_name(step.iteration, step.attempt.step, step.shard), group_id
