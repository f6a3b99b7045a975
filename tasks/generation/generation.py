"""Generation of samples. A prompt fails only because of what the engine reports about it.

| what happens while a group is generated | consequence for the group |
|---|---|
| the engine rejects the prompt | the group fails at once |
| the engine survives but fails among other groups | the step is retried; after `TOGETHER` such tries it is a suspect |
| the engine survives but fails on a suspect, generated alone | the step is retried; after `ALONE` such tries it fails |
| the engine dies, is silent, unreachable or aborted, loses samples, or has other weights | the step is retried |

Only what the engine reports about a prompt counts against it. Any other failure leaves the group unchanged: the step is
retried as often as `retry` allows, and then the run ends with the error, to be resumed. If engines are lost repeatedly,
the error names the prompts that were unfinished each time (`cairn.tasks.durable.casualties`).

A failed sample carries the error and no token, and its group fails with it: it is not graded, and the filter drops the
group and requests another. A suspect on which the engine does not fail is a group like any other. So failures of
processes, machines and networks do not change the groups that are trained on: they are those of a run in which nothing
fails.

If only some of the groups are needed, the others are aborted as soon as these are generated, and are returned as far as
they came. Alternatively each sample is cut after a number of tokens of its own (`cairn.tasks.generation.rollout`).
Every token must come from the weights that the step wants: an engine that serves others is an error.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, overload

from cairn.engines.agents.episodes.context import EpisodeOptions
from cairn.engines.agents.episodes.user_code import SINGLE_TURN, GenerateFunction
from cairn.engines.types.errors import EngineDied, EngineTimeout, GenerationFailed
from cairn.engines.types.keeping import SampleEnd, WantedSample
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import SamplingParams
from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.casualties import Place
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.plugin_sources import require_recorded
from cairn.tasks.durable.step import StepCall
from cairn.tasks.durable.versions import version_of
from cairn.tasks.generation.checks import require_versions, usable
from cairn.tasks.generation.episodes import LoggedCalls
from cairn.tasks.generation.rounds import Request, Unfinished, until_enough
from cairn.tasks.trainer.sync import serve

Messages = Iterator[list[GeneratedSample] | Recorded] | Iterator[list[SampleEnd] | Recorded]
"""What an engine yields: samples, or their ends where a keeper takes the samples; and records of calls before that."""
Ask = Callable[[Sequence[Any], SamplingParams, GenerateFunction], Messages]
"""Function that has an engine generate samples."""


class Engine(Protocol):
    """Interface that generation needs of a rollout engine, or of its proxy in the driver."""

    name: str

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples: see `cairn.engines.agents.episodes.samples.SampleEngine`."""

    def acknowledge(self, number: int) -> None:
        """Acknowledge records: see `SampleEngine`. May be called from any thread."""

    def abort(self) -> None:
        """Abort the generation: see `SampleEngine`. Called from the thread that reads the stream."""


TOGETHER = 2
"""Failures of the engine itself, among other groups, after which a group is a suspect."""
ALONE = 2
"""Failures of the engine itself on a suspect alone, after which the group fails. With three retries of a step (`retry`)
this is one driver's last try."""


def _failed(request: Request, error: str) -> GeneratedSample | SampleEnd:
    if isinstance(request, SampleRequest):
        return GeneratedSample.failed(request, error)
    return SampleEnd.failed(request, error)


def _aborted(request: Request) -> GeneratedSample | SampleEnd:
    return GeneratedSample.aborted(request) if isinstance(request, SampleRequest) else SampleEnd.aborted(request)


@overload
def generate_samples(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    rows: Mapping[int, int],
    calls: LoggedCalls,
    interrupted: Callable[[], bool] = ...,
    newest: Callable[[], Commit | None] | None = ...,
    joined: Callable[[], Sequence[SampleRequest]] = ...,
) -> Iterator[list[GeneratedSample]]: ...


@overload
def generate_samples(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    samples: Sequence[WantedSample],
    params: SamplingParams,
    *,
    rows: Mapping[int, int],
    calls: LoggedCalls,
    ask: Ask,
    enough: int | None = ...,
) -> Iterator[list[SampleEnd]]: ...


def generate_samples(
    step: StepCall,
    engine: Engine,
    weights: Commit | None,
    samples: Sequence[Any],
    params: SamplingParams,
    *,
    rows: Mapping[int, int],
    calls: LoggedCalls,
    ask: Ask | None = None,
    enough: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
    newest: Callable[[], Commit | None] | None = None,
    joined: Callable[[], Sequence[SampleRequest]] = lambda: (),
) -> Iterator[list[Any]]:
    """Generate samples with the weights that `weights` left, and yield each as it ends, or its end where a keeper takes
    it.

    Raises EngineError where a retry of the step may help.

    Args:
        rows: maps the id of a group to its row in the data, from 0.
        calls: logs the calls of the samples.
        ask: has the engine generate samples for a keeper, which checks their weights.
        enough: groups without a failure after which the others are aborted and yielded as far as they came.
        interrupted: whether another thread aborts what the engine generates. Aborted samples are then yielded too.
        newest: returns the weights that the engine was meanwhile updated to, where weights are updated during
            generation.
        joined: returns the samples that were added to the engine since the last call.
    """
    casualties = step.run.casualties
    groups: dict[int, list[Request]] = defaultdict(list)
    for sample in samples:
        groups[sample.group_id].append(sample)
    for id in list(groups):
        if (error := casualties.blamed(step.name, id)) is not None:
            yield [_failed(sample, error) for sample in groups.pop(id)]
    suspects = [id for id in groups if is_suspect(step, id)]
    others = [sample for id, group in groups.items() if id not in suspects for sample in group]
    generation = _Generation(
        *(step, engine, ask or engine.generate_samples, params, calls, interrupted),
        *(newest or (lambda: weights), joined, Unfinished(enough)),
    )
    with explaining_losses(step, rows):
        yield from generation.together(weights, others[:: -1 if casualties.times(step.name) % 2 else 1])
        for id in suspects:
            yield from generation.alone(groups[id])


def is_suspect(step: StepCall, group_id: int) -> bool:
    """Return whether a group is generated alone."""
    return step.run.failed_generations[step.name, group_id] >= TOGETHER


@contextmanager
def explaining_losses(step: StepCall, rows: Mapping[int, int]) -> Iterator[None]:
    """Name the prompts that may have ended the engine in the error of its loss. `rows`: see `generate_samples`."""
    try:
        yield
    except (EngineDied, EngineTimeout) as error:
        place = Place(step.run.ledger.run, step.iteration, step.attempt.step, step.run.config.rollout.engine)
        raise type(error)(step.run.casualties.explain(step.name, error, rows, place)) from error


@contextmanager
def recording_failures(step: StepCall, unfinished: Callable[[], Collection[int]]) -> Iterator[None]:
    """Record a failure of the engine with the groups that are unfinished then."""
    try:
        yield
    except GenerationFailed:
        step.run.failed_generations.update((step.name, id) for id in unfinished())
        raise
    except (EngineDied, EngineTimeout) as error:
        step.run.casualties.add(step.name, unfinished(), hung=isinstance(error, EngineTimeout))
        raise


@dataclass(frozen=True)
class _Generation:
    """Generation of a step's samples by one engine. See `generate_samples` for the fields."""

    step: StepCall
    engine: Engine
    ask: Ask
    params: SamplingParams
    calls: LoggedCalls
    interrupted: Callable[[], bool]
    newest: Callable[[], Commit | None]
    joined: Callable[[], Sequence[SampleRequest]]
    unfinished: Unfinished

    def together(self, weights: Commit | None, samples: Sequence[Request]) -> Iterator[list[Any]]:
        """Generate samples in one call of the engine."""
        if not samples or self.unfinished.is_enough or self.interrupted():
            yield list(map(_aborted, samples))
            return
        self.unfinished.add(samples)
        with recording_failures(self.step, lambda: self.unfinished.groups):
            stream = self._checked(weights, {sample.key: sample for sample in samples})
            yield from until_enough(self.engine.name, stream, self.unfinished, self.engine.abort, self.interrupted)

    def _checked(self, weights: Commit | None, requests: dict[SampleKey, Request]) -> Iterator[list[Any]]:
        """Have samples generated; yield those that may be kept, or their ends where a keeper has checked them."""
        run, engine = self.step.run, self.engine

        def take_joined() -> None:
            others = self.joined()
            self.unfinished.add(others)
            requests.update({sample.key: sample for sample in others})

        for message in self.ask(list(requests.values()), self.params, generate_function(run)):
            if isinstance(message, Recorded):
                self.calls.take(message, engine.acknowledge)
                continue
            self.calls.require_intact()
            take_joined()
            versions = version_of(weights), version_of(self.newest())
            checked: list[Any] = []
            for sample in message:
                request = requests[sample.key]
                if isinstance(request, SampleRequest) and isinstance(sample, GeneratedSample):
                    sample = usable(run.config.model.path, request, sample)
                    require_versions(engine.name, request, sample, versions)
                checked.append(sample)
            yield checked
        take_joined()
        generate_function(run)  # read before and after: so it is what was run

    def alone(self, group: Sequence[Request]) -> Iterator[list[Any]]:
        """Generate the samples of a suspect."""
        run, group_id = self.step.run, group[0].group_id
        with run.suspects_lock:  # one suspect at a time, so that each answers for its own failures
            weights = self.newest()
            serve(run, self.engine, weights)
            try:
                generated = list(self.together(weights, group))
            except GenerationFailed as error:
                if run.failed_generations[self.step.name, group_id] < TOGETHER + ALONE:
                    raise
                generated = [[_failed(sample, f"{type(error).__name__}: {error}") for sample in group]]
                self.unfinished.give_up(group_id)
                serve(run, self.engine, self.newest())
        yield from generated


def generate_function(run: RunContext) -> GenerateFunction:
    """Return the function that generates a sample, for engines. Raises BadPlugin where the user's function or tools are
    not what the run recorded."""
    option = "rollout.custom_generate_function_path"
    name = run.config.rollout.custom_generate_function_path
    if name == SINGLE_TURN:
        return GenerateFunction(name)
    if "." in name:
        require_recorded([name], run.ledger.terms.plugin_digest(option))
    file, separator, function = name.rpartition(":")
    if separator and file.endswith(".py"):
        name = f"{Path(file).expanduser().resolve()}:{function}"
    rollout = run.config.rollout
    tools = [name for name in rollout.tools if "." in name]
    if tools:
        require_recorded(tools, run.ledger.terms.plugin_digest("rollout.tools"))
    return GenerateFunction(
        name,
        tuple(map(os.path.abspath, sys.path)),
        os.path.abspath(run.config.model.path),
        rollout.custom_generate_timeout,
        rollout.episode_timeout,
        EpisodeOptions.of(run.config),
    )
