"""The one durable-step wrapper.

A step is a pure function of commits. Calling it looks its commit up in the ledger:

    there, same inputs and configuration   -> returned as it is; nothing runs
    there, other inputs or configuration   -> StaleCommits; the run must not go on
    not there                              -> the body runs, writes files into a fresh attempt folder, and the commit
                                              is created exclusively; whoever loses that race adopts the winner's

so a step may be called any number of times, by any driver, and happens once.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, ParamSpec

import pyarrow as pa

from configs.digest import digest as config_digest_of
from configs.schema.run import RunConfig
from storage import canonical
from storage.commits import Commit, OutputFile, Step
from storage.errors import StaleCommits
from storage.snapshots import Attempt
from tasks.context import RunContext
from tasks.events import StepCommitted, StepStarted

Args = ParamSpec("Args")


@dataclass(frozen=True)
class Outcome:
    """What a step's body made, to be committed."""

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    """Parquet files to write, by name."""
    files: Sequence[OutputFile] = ()
    """Files that the body has already written into the attempt's folder."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Small results that later steps read, as JSON values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds, by what they went into."""
    weight_version_in: int | None = None
    weight_version_out: int | None = None
    state_digest: str | None = None


@dataclass(frozen=True)
class StepCall:
    """One execution of a step's body: where it stands and where it may write."""

    run: RunContext
    iteration: int
    shard: str | None
    attempt: Attempt
    input_digest: str
    """Of all inputs and the configuration read: equal for every driver that executes this step."""


@dataclass(frozen=True)
class DurableStep(Generic[Args]):
    """A step body with its name and what it reads of the configuration."""

    name: Step
    body: Callable[Concatenate[StepCall, Args], Outcome]
    reads: tuple[str, ...]
    """Configuration fields, dotted, that the body reads: their digest is part of the commit."""
    externals: tuple[str, ...]
    """Inputs from outside the ledger, by their name in the run's manifest: `data`, `model`, `eval`, and `ref_model`,
    `teacher_model` and `critic_model` where the run has them."""
    plugins: tuple[str, ...]
    """Configuration fields that name user code: its source is part of the configuration digest."""

    def __call__(
        self, run: RunContext, iteration: int, shard: str | None, *args: Args.args, **kwargs: Args.kwargs
    ) -> Commit:
        """Return the step's commit, made now if it is not there. Raises what the body raises, and StaleCommits."""
        inputs = self._inputs(run, args, kwargs)
        config_digest = self.config_digest(run.config, run.plugin_digest)
        committed = run.find(iteration, self.name, shard)
        if committed is not None:
            require_fresh(committed, inputs, config_digest)
            run.emit(StepCommitted(committed, adopted=True))
            return committed
        run.emit(StepStarted(iteration, self.name, shard))
        started_at, began = time.time(), time.perf_counter()
        attempt = run.ledger.attempt(iteration, self.name, shard)
        call = StepCall(run, iteration, shard, attempt, input_digest(inputs, config_digest))
        outcome = self.perform(call, *args, **kwargs)
        commit = run.commit(
            iteration=iteration,
            step=self.name,
            shard=shard,
            attempt=attempt,
            inputs=inputs,
            config_digest=config_digest,
            outputs=tuple(outcome.files),
            weight_version_in=outcome.weight_version_in,
            weight_version_out=outcome.weight_version_out,
            state_digest=outcome.state_digest,
            values=dict(outcome.values),
            metrics=dict(outcome.metrics),
            timings=dict(outcome.timings),
            started_at=started_at,
        )
        require_fresh(commit, inputs, config_digest)
        run.emit(StepCommitted(commit, adopted=commit.attempt != attempt.name, seconds=time.perf_counter() - began))
        return commit

    def perform(self, call: StepCall, *args: Args.args, **kwargs: Args.kwargs) -> Outcome:
        """Run the body and write its tables; the outcome then names every file and the seconds that both took."""
        began = time.perf_counter()
        outcome = self.body(call, *args, **kwargs)
        ran = time.perf_counter()
        written = []
        for name, table in outcome.tables.items():
            written.append(call.attempt.write_table(name, table))
            call.run.remember(written[-1], table)
        timings = {"run": ran - began, "write": time.perf_counter() - ran, **outcome.timings}
        return replace(outcome, tables={}, files=[*outcome.files, *written], timings=timings)

    def _inputs(self, run: RunContext, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
        commits, scalars = [], {}
        for name, value in [*enumerate(args), *kwargs.items()]:
            if isinstance(value, Commit):
                commits.append(value)
            elif isinstance(value, list | tuple) and all(isinstance(item, Commit) for item in value):
                commits.extend(value)
            elif value is not None:
                scalars[str(name)] = value
        inputs = {commit.name: commit.digest for commit in commits}
        inputs |= {name: digest for name in self.externals if (digest := run.external_digest(name)) is not None}
        if scalars:
            inputs["arguments"] = canonical.digest(scalars)
        return dict(sorted(inputs.items()))

    def config_digest(self, config: RunConfig, plugin_digest: Callable[[str], str]) -> str:
        """Of what the step reads of a configuration, the source of user code included."""
        fields = config_digest_of(config, self.reads)
        sources = {name: plugin_digest(name) for name in self.plugins}
        return canonical.digest({"fields": fields, "plugins": sources}) if any(sources.values()) else fields


def durable(
    name: Step, *, reads: tuple[str, ...], externals: tuple[str, ...] = (), plugins: tuple[str, ...] = ()
) -> Callable[[Callable[Concatenate[StepCall, Args], Outcome]], DurableStep[Args]]:
    """Make a durable step of a body. Its Commit arguments become inputs; its other arguments must be JSON values."""

    def wrap(body: Callable[Concatenate[StepCall, Args], Outcome]) -> DurableStep[Args]:
        return DurableStep(name, body, reads, externals, plugins)

    return wrap


def require_fresh(commit: Commit, inputs: Mapping[str, str], config_digest: str) -> None:
    """Raise StaleCommits unless the commit was made from these inputs under this configuration."""
    changed = sorted(name for name in {*inputs, *commit.inputs} if inputs.get(name) != commit.inputs.get(name))
    if commit.config_digest != config_digest:
        changed.append("configuration")
    if changed:
        raise StaleCommits([(commit.iteration, commit.step, commit.shard, "changed: " + ", ".join(changed))])


def input_digest(inputs: Mapping[str, str], config_digest: str) -> str:
    """Digest of everything that a step reads: equal for every driver that executes it."""
    return canonical.digest({"inputs": dict(inputs), "config": config_digest})
