"""The durable-step wrapper.

A step is a pure function of commits. A call looks up the step's commit in the ledger:

    found, same inputs and configuration   -> the commit is returned; nothing runs. A commit that another version of
                                              the code wrote is compared with what that version read
                                              (`cairn.storage.ledger.terms`)
    found, other inputs or configuration   -> StaleCommits; the run must not continue
    not found                              -> the body runs, writes files into a fresh attempt folder, and the commit
                                              is created exclusively, that of a shard with others in one record
                                              (`cairn.storage.ledger.shards`); a driver that loses this race adopts
                                              the winner's

So any driver may call a step any number of times, and the step happens once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec

import pyarrow as pa

from cairn.configs.digest import digest as config_digest_of
from cairn.configs.digest import recorded_digest
from cairn.configs.engines import ENGINES
from cairn.configs.kinds import code_options
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import Reader, reads_under, view
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.layout import commit_name
from cairn.storage.ledger.shards import SHARED
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.ledger.terms import Rules, Terms
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import StaleCommits
from cairn.tasks.data.drawing import MixedData
from cairn.tasks.durable.beside import StepProcess
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted

# Comparison of environments: bitwise equality is claimed between equal environments only.


def changes(then: Environment, now: Environment) -> Iterator[str]:
    """Yield a phrase for each difference, ignoring the machine's name."""
    old, new = (one.model_dump(exclude={"host", "versions"}) | one.versions for one in (then, now))
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield f"{name} was {old.get(name)}, is {new.get(name)}"


def report_environment_change(run: RunContext, before: Commit, now: Environment) -> None:
    """Emit a warning, once per change, if a step runs in another environment than when `before` was committed."""
    changed = "; ".join(changes(before.environment, now))
    if changed and run.notice(f"{before.step} {changed}"):
        run.emit(
            Message(
                f"{before.step} runs in another environment than in iteration {before.iteration} ({changed}): bits may "
                "differ from here on",
                "warning",
            )
        )


Args = ParamSpec("Args")


@dataclass(frozen=True)
class Outcome:
    """Result of a step's body, ready to be committed."""

    tables: Mapping[str, pa.Table] = field(default_factory=dict)
    """Parquet files to write, by name."""
    files: Sequence[OutputFile] = ()
    """Files that the body has already written into the attempt's folder."""
    selected: Sequence[Commit] = ()
    """Commits that the body read besides its arguments, of the steps in `finds`. They become inputs too."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Small results that later steps read, as JSON values."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds by what they were spent on."""
    weight_version_in: int | None = None
    weight_version_out: int | None = None
    state_digest: str | None = None
    environment: Environment | None = None
    """Environment that computed the outcome; None for the driver's own process and its graders."""


@dataclass(frozen=True)
class StepCall:
    """Execution of a step's body: its place in the run and the attempt that it may write to."""

    run: RunContext
    iteration: int
    shard: str | None
    attempt: Attempt
    input_digest: str
    """Digest of all inputs and the configuration read: equal for every driver that executes this step."""
    earlier_digests: frozenset[str] = frozenset()
    """Digests of the same under the terms of earlier code versions that resumed the run."""

    @property
    def name(self) -> str:
        """The name that the step's commit will have."""
        return commit_name(self.iteration, self.attempt.step, self.shard)


BESIDE_BYTES = 2**20
"""Bytes of tables that the driver would have to read for a step, from which on its body runs beside the driver."""


@dataclass(frozen=True)
class GraderTerms:
    """What a step beside the driver knows of the grader, which grades in the driver."""

    name: str
    version: str
    sees_whole_samples: bool
    sees_tokens: bool
    by_group: bool


@dataclass(frozen=True)
class StepRequest:
    """Execution of a step's body beside the driver. Can be pickled."""

    step: Step
    config: RunConfig
    store_url: str
    run: str
    created_at: float
    """Time when the run was created, to which the chat template's clock is fixed."""
    iteration: int
    shard: str | None
    attempt: str
    input_digest: str
    earlier_digests: frozenset[str]
    environment: Environment
    grader: GraderTerms
    sources: Mapping[str, str]
    """Recorded digest of the source of the user code that each option names."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(
        cls, step: "DurableStep[Any]", call: StepCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "StepRequest":
        """Return the request for a call of a step."""
        run, grader = call.run, call.run.grader
        return cls(
            step.name,
            run.config,
            run.ledger.store.url,
            run.ledger.run,
            run.ledger.manifest.created_at,
            call.iteration,
            call.shard,
            call.attempt.name,
            call.input_digest,
            call.earlier_digests,
            run.environment,
            GraderTerms(grader.name, grader.version, grader.sees_whole_samples, grader.sees_tokens, grader.by_group),
            {option: run.ledger.terms.plugin_digest(option) for option in step.plugins},
            args,
            kwargs,
        )


def goes_beside(call: StepCall) -> bool:
    """Return whether a step needs nothing of the run's data, which is open in the driver alone, and writes into the
    run's own store."""
    run = call.run
    in_store = call.attempt.store.url == run.ledger.store.url
    return in_store and not isinstance(run.data, MixedData) and not run.grader.sees_messages


def _reads_much(run: RunContext, arguments: Sequence[Any]) -> bool:
    lists = (argument if isinstance(argument, list | tuple) else [argument] for argument in arguments)
    commits = (item for one in lists for item in one if isinstance(item, Commit))
    tables = (table for commit in commits for table in commit.tables if not run.holds(table))
    return sum(table.bytes for table in tables) >= BESIDE_BYTES


def _answer(run: RunContext, question: Any) -> Any:
    """Return the grades of samples, for a step beside the driver. `question`: arguments of `Grading.grade`."""
    return run.grader.grade(*question)


@dataclass(frozen=True)
class DurableStep(Generic[Args]):
    """A step body with its name and the configuration fields that it reads. Any other field raises UndeclaredRead, in
    the body and in all code that the body calls: see `cairn.configs.view`."""

    name: Step
    body: Callable[Concatenate[StepCall, Args], Outcome]
    reads: tuple[str, ...]
    """Configuration fields, dotted, that the body reads. Their digest is part of the commit."""
    externals: tuple[str, ...]
    """Inputs from outside the ledger, by their names in the run's manifest: `data`, `model`, `eval`, and `ref_model`,
    `teacher_model` and `critic_model` where the run has them."""
    engines: tuple[str, ...]
    """Engines that the body calls, `rollout` and `training`. What they are made from is an input."""
    finds: tuple[Step, ...] = ()
    """Steps whose commits the body selects itself while it runs. The selection depends on timing, and the step's own
    commit records it."""
    beside: bool = False
    """Whether the body may run beside the driver: it reads tokens, and of the run it needs only a `StepRequest`."""

    @property
    def options(self) -> tuple[str, ...]:
        """All options that its commits depend on, through the body or through an engine."""
        return (*self.reads, *(option for name in self.engines for option in ENGINES[name]))

    @property
    def plugins(self) -> tuple[str, ...]:
        """The options that name user code. Its source is part of the configuration digest."""
        return code_options(self.options)

    def __call__(
        self, run: RunContext, iteration: int, shard: str | None, *args: Args.args, **kwargs: Args.kwargs
    ) -> Commit:
        """Return the step's commit; make it now if it does not exist. Raises what the body raises, and StaleCommits."""
        arguments = argument_digests(args, kwargs)
        inputs = arguments | self._external_inputs(run)
        config_digest = self.config_digest(run.config, run.ledger.terms.plugin_digest)
        committed = run.find(iteration, self.name, shard)
        if committed is not None:
            self._require_fresh(run, committed, arguments, inputs, config_digest)
            run.emit(StepCommitted(committed, adopted=True))
            return committed
        run.emit(StepStarted(iteration, self.name, shard))
        started_at, began = time.time(), time.perf_counter()
        attempt = run.ledger.attempt(iteration, self.name, shard)
        earlier = self._earlier_digests(run, arguments)
        call = StepCall(run, iteration, shard, attempt, input_digest(inputs, config_digest), earlier)
        shared = self.name in SHARED
        with run.ledger.running(iteration) if shared else nullcontext():
            try:
                with attempt.discarded_on_failure():
                    outcome = self.perform(call, *args, **kwargs)
            except Exception:
                run.retries.failed((iteration, self.name, shard), time.perf_counter() - began)
                raise
            tried, replayed = run.retries.take((iteration, self.name, shard)), run.replays.take()
            commit = run.commit(
                iteration=iteration,
                step=self.name,
                shard=shard,
                attempt=attempt,
                inputs=dict(sorted((inputs | {one.name: one.digest for one in outcome.selected}).items())),
                config_digest=config_digest,
                outputs=tuple(outcome.files),
                weight_version_in=outcome.weight_version_in,
                weight_version_out=outcome.weight_version_out,
                state_digest=outcome.state_digest,
                values=dict(outcome.values),
                metrics={**outcome.metrics, **tried.metrics(), **replayed.metrics()},
                timings={**outcome.timings, **tried.timings(), **replayed.timings()},
                started_at=started_at,
                environment=outcome.environment or run.environment,
                shared=shared,
            )
        before = run.find(iteration - 1, self.name, shard) if iteration else None
        if before is not None:
            report_environment_change(run, before, commit.environment)
        self._require_fresh(run, commit, arguments, inputs, config_digest)
        run.emit(StepCommitted(commit, adopted=commit.attempt != attempt.name, seconds=time.perf_counter() - began))
        return commit

    def perform(self, call: StepCall, *args: Args.args, **kwargs: Args.kwargs) -> Outcome:
        """Run the body and write its tables. Return the outcome with every file and the seconds for both.

        A body that may run beside the driver does so where the run has a process for it and there is much to read.
        """
        process = call.run.attached(StepProcess)
        if (
            process is not None
            and self.beside
            and goes_beside(call)
            and _reads_much(call.run, [*args, *kwargs.values()])
        ):
            outcome: Outcome = process.call(StepRequest.of(self, call, args, kwargs), partial(_answer, call.run))
            return outcome
        call = replace(call, run=call.run.seen_as(view(call.run.config, self._reader(call.run.config))))
        began = time.perf_counter()
        outcome = self.body(call, *args, **kwargs)
        ran = time.perf_counter()
        written = []
        for name, table in outcome.tables.items():
            written.append(call.attempt.write_table(name, table))
            call.run.remember(written[-1], table)
        timings = {"run": ran - began, "write": time.perf_counter() - ran, **outcome.timings}
        return replace(outcome, tables={}, files=[*outcome.files, *written], timings=timings)

    def rules(self, config: RunConfig) -> Rules:
        """Return what the step reads under a configuration, including the user code that it names."""
        engines = {name: reads_under(config, ENGINES[name]) for name in self.engines}
        reads = reads_under(config, self.reads)
        return Rules(reads=reads, externals=self.externals, plugins=self.plugins, engines=engines)

    def circumstances(self, run: RunContext) -> str:
        """Return the digest of all that its commits depend on besides its arguments."""
        config_digest = self.config_digest(run.config, run.ledger.terms.plugin_digest)
        return input_digest(self._external_inputs(run), config_digest)

    def earlier_circumstances(self, run: RunContext) -> frozenset[str]:
        """Return the same digests under the terms of earlier code versions that resumed the run."""
        return self._earlier_digests(run, {})

    def _reader(self, config: RunConfig) -> Reader:
        where = f"`reads` of {self.body.__name__} in {self.body.__module__}, or of your `cairn.plugin`"
        return Reader(f"step {self.name}", where, reads_under(config, self.options))

    def _external_inputs(self, run: RunContext) -> dict[str, str]:
        inputs = run.ledger.terms.inputs
        read = {name: inputs[name] for name in self.externals if name in inputs}
        engines = self.rules(run.config).engines
        return read | {f"engine.{name}": config_digest_of(run.config, options) for name, options in engines.items()}

    def _require_fresh(
        self,
        run: RunContext,
        commit: Commit,
        arguments: Mapping[str, str],
        inputs: Mapping[str, str],
        config_digest: str,
    ) -> None:
        terms = run.ledger.terms_of(commit)
        if not terms.equals(run.ledger.terms):
            inputs, config_digest = self._recorded_digests(terms, arguments)
        selected = {name: digest for name, digest in commit.inputs.items() if step_of(name) in self.finds}
        require_fresh(commit, {**inputs, **selected}, config_digest)

    def _earlier_digests(self, run: RunContext, arguments: Mapping[str, str]) -> frozenset[str]:
        return frozenset(
            input_digest(*self._recorded_digests(terms, arguments))
            for terms in (run.ledger.manifest, *run.ledger.upgrades)
            if not terms.equals(run.ledger.terms)
        )

    def _recorded_digests(self, terms: Terms, arguments: Mapping[str, str]) -> tuple[dict[str, str], str]:
        """Return the digests of the inputs, and of the configuration that the step read, under recorded terms. A run
        need not have every external input."""
        rules = terms.rules[self.name]
        externals = {name: terms.inputs[name] for name in rules.externals if name in terms.inputs}
        engines = {f"engine.{name}": recorded_digest(terms.config, options) for name, options in rules.engines.items()}
        sources = {option: terms.plugin_digest(option) for option in rules.plugins}
        fields = recorded_digest(terms.config, rules.reads)
        return {**arguments, **externals, **engines}, _with_sources(fields, sources)

    def config_digest(self, config: RunConfig, plugin_digest: Callable[[str], str]) -> str:
        """Return the digest of what the step reads of a configuration, including the source of user code."""
        fields = config_digest_of(config, reads_under(config, self.reads))
        return _with_sources(fields, {name: plugin_digest(name) for name in self.plugins})


def _with_sources(fields: str, sources: Mapping[str, str | None]) -> str:
    """Return the digest of configuration fields and the sources of user code; without user code that of the fields."""
    return canonical.digest({"fields": fields, "plugins": dict(sources)}) if any(sources.values()) else fields


def durable(
    name: Step,
    *,
    reads: tuple[str, ...] = (),
    externals: tuple[str, ...] = (),
    engines: tuple[str, ...] = (),
    finds: tuple[Step, ...] = (),
    beside: bool = False,
) -> Callable[[Callable[Concatenate[StepCall, Args], Outcome]], DurableStep[Args]]:
    """Turn a body into a durable step. Its Commit arguments become inputs; its other arguments must be JSON values.
    `DurableStep` explains the parameters."""

    def wrap(body: Callable[Concatenate[StepCall, Args], Outcome]) -> DurableStep[Args]:
        return DurableStep(name, body, reads, externals, engines, finds, beside)

    return wrap


def step_of(name: str) -> str | None:
    """Return the step of an input that is a commit (`rollout` for `000042/rollout.00-000`); None for other inputs."""
    _, separator, rest = name.partition("/")
    return rest.partition(".")[0] if separator else None


def argument_digests(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the digests of a step's arguments."""
    commits, scalars = [], {}
    for name, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Commit):
            commits.append(value)
        elif isinstance(value, list | tuple) and all(isinstance(item, Commit) for item in value):
            commits.extend(value)
        elif value is not None:
            scalars[str(name)] = value
    inputs = {commit.name: commit.digest for commit in commits}
    if scalars:
        inputs["arguments"] = canonical.digest(scalars)
    return inputs


def require_fresh(commit: Commit, inputs: Mapping[str, str], config_digest: str) -> None:
    """Raise StaleCommits unless the commit was made from these inputs under this configuration."""
    changed = sorted(name for name in {*inputs, *commit.inputs} if inputs.get(name) != commit.inputs.get(name))
    if commit.config_digest != config_digest:
        changed.append("configuration")
    if changed:
        raise StaleCommits([(commit.iteration, commit.step, commit.shard, "changed: " + ", ".join(changed))])


def input_digest(inputs: Mapping[str, str], config_digest: str) -> str:
    """Return the digest of everything that a step reads: equal for every driver that executes it."""
    return canonical.digest({"inputs": dict(inputs), "config": config_digest})
