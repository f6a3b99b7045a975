"""`replay`: execute committed steps again, outside the ledger, and compare the results with the commits.

The iteration's own DAG is executed, and every step is looked up in the ledger, except the requested one: its body runs
with the inputs of its commit, into a temporary folder. Engines start only where the step needs them, in a separate
fleet: a live driver of the run is not disturbed. Steps that do not sample, grade or publish only get the training
engine.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from cairn.configs.errors import BadInput
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.session import adding_stale_steps, fleet_name, starting_fleet, total_steps
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.driver.trust import recorded_config
from cairn.flows.events import Event
from cairn.flows.iteration import admit, iteration, up_to_learning
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import redacted_samples
from cairn.storage.ledger.snapshots import Attempt
from cairn.storage.ledger.terms import input_differences
from cairn.storage.opening import open_store
from cairn.storage.records import Record
from cairn.storage.store.errors import Retired, RunDiffers
from cairn.storage.store.store import Store
from cairn.storage.upkeep.comparison import compare
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.selection import find_selection
from cairn.tasks.durable.step import DurableStep, StepCall, changes, input_digest
from cairn.tasks.trainer.recovery import ReplayDiverged, layout_differences

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet


UPDATES = frozenset({Step.SCORE, Step.ADVANTAGE, Step.TRAIN})
"""Steps that produce the weights of an iteration from its selected batch."""
_USING_OTHER_ENGINES = frozenset({Step.ROLLOUT, Step.REWARD, Step.SYNC, Step.EVAL})
"""Steps that may need other engines than the training engine."""


class NothingToReplay(BadInput):
    """The iteration has no commit of that step."""


class Replayed(Record):
    """A commit, compared with the result of its replayed step."""

    name: str
    """Name of the commit: `000042/rollout.00-000`."""
    differences: tuple[str, ...] = ()
    """Sentences on differences; none if every bit is equal."""
    environment: tuple[str, ...] = ()
    """Differences from the environment of the commit."""
    skipped: str | None = None
    """Why the step was not replayed, where it cannot be."""


class Weights(Record):
    """The newest weights of a run, and whether the replay of all steps behind them reproduces them."""

    iteration: int
    """Iteration that produced the weights."""
    weight_version: int
    state_digest: str
    """Committed digest of the training state."""
    same: bool | None
    """Whether the replay is equal; None: the update that produced them cannot be replayed."""
    differs_at: str | None
    """First commit whose replayed result differs."""
    not_done_again: int
    """Number of iterations whose update cannot be replayed: the replay resumes from a checkpoint after them."""


class Layouts:
    """Contexts of a run in the layouts of ranks and engines in which its commits were made. One is open at a time; its
    engines start where a step needs them."""

    def __init__(self, ledger: Ledger, emit: Callable[[Event], None], *, trains_only: bool) -> None:
        self._ledger, self._emit, self._trains_only = ledger, emit, trains_only
        self._opened = ExitStack()
        self._run: RunContext | None = None
        self._config = ledger.config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def any(self) -> RunContext:
        """Return the context that is open, or one in the newest layout."""
        return self._open(None) if self._run is None else self._run

    def of(self, commit: Commit) -> RunContext:
        """Return a context in the layout in which a commit was made. Contexts of before are closed if it is another."""
        config = self._ledger.config_of(commit)
        if self._run is not None and not self._differences(config, self._config):
            return self._run
        if changes := self._differences(config, self._ledger.config):
            self._emit(Message(f"{commit.name} is replayed in the layout in which it was made: {changes}"))
        self._opened.close()
        self._config = config
        return self._open(commit)

    def _open(self, commit: Commit | None) -> RunContext:
        opening = read_only_context(self._ledger, self._emit, trains_only=self._trains_only, made=commit)
        self._run = self._opened.enter_context(opening)
        return self._run

    def _differences(self, then: RunConfig, now: RunConfig) -> str:
        return layout_differences(then, now, "training." if self._trains_only else "")


class Replaying:
    """A StepRunner that returns commits from the ledger, and executes the wanted steps again."""

    def __init__(
        self,
        run: RunContext,
        wanted: Collection[Step],
        shard: str | None,
        scratch: Store,
        on_replayed: Callable[[Replayed], None] = lambda replayed: None,
        continue_on_error: bool = False,
        layout_of: Callable[[Commit], RunContext] | None = None,
    ) -> None:
        """Create the runner.

        Args:
            run: finds the commits.
            on_replayed: is called with each replayed step.
            continue_on_error: continue after a step that cannot be replayed, or whose input weights cannot be
                reproduced.
            layout_of: returns the context that executes the step of a commit again; `run` by default.
        """
        self._run, self._wanted, self._shard, self._scratch = run, wanted, shard, scratch
        self._layout_of = layout_of or (lambda commit: run)
        self._on_replayed, self._continue_on_error = on_replayed, continue_on_error
        self.replayed: list[Replayed] = []

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        committed = self._run.find(index, step.name, shard)
        if committed is None:
            raise _EndOfLedger
        if step.name in self._wanted and self._shard in (None, shard):
            replayed = self._replay(step, committed, *args, **kwargs)
            self.replayed.append(replayed)
            self._on_replayed(replayed)
        return committed

    def submit(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> "_Done":
        try:
            inputs = [argument.result() if isinstance(argument, _Done) else argument for argument in args]
            return _Done(self.call(step, index, shard, *inputs, **kwargs))
        except _EndOfLedger:  # steps submitted at the same time may have commits
            return _Done(None)

    def _replay(self, step: DurableStep[Any], committed: Commit, *args: Any, **kwargs: Any) -> Replayed:
        try:
            return self._execute(step, committed, *args, **kwargs)
        except (Retired, ReplayDiverged) as error:
            if not self._continue_on_error:
                raise
            if isinstance(error, Retired):
                return Replayed(name=committed.name, skipped=str(error))
            return Replayed(name=committed.name, differences=(str(error),))

    def _execute(self, step: DurableStep[Any], committed: Commit, *args: Any, **kwargs: Any) -> Replayed:
        redacted = redacted_samples(self._run.ledger)
        for name in (committed.name, *committed.inputs):
            if name in redacted:
                why = f"decision {redacted[name]} has redacted samples of {name}"
                return Replayed(name=committed.name, skipped=why)
        if step.finds:
            why = "its samples were chosen when it ran and are recorded: later steps read the record"
            return Replayed(name=committed.name, skipped=why)
        run = self._layout_of(committed)
        attempt = Attempt(
            self._scratch, committed.run, committed.iteration, step.name, committed.shard, committed.attempt
        )
        inputs = input_digest(committed.inputs, committed.config_digest)
        outcome = step.perform(StepCall(run, committed.iteration, committed.shard, attempt, inputs), *args, **kwargs)
        result = committed.model_copy(
            update={
                "outputs": tuple(outcome.files),
                "weight_version_in": outcome.weight_version_in,
                "weight_version_out": outcome.weight_version_out,
                "state_digest": outcome.state_digest,
                "values": dict(outcome.values),
            }
        )
        compared = compare(committed, run.ledger.store, result, self._scratch)
        return Replayed(
            name=committed.name,
            differences=(*compared.differences, *compared.retired),
            environment=tuple(changes(committed.environment, outcome.environment or run.environment)),
        )


def replay(
    ledger: Ledger,
    index: int,
    step: Step,
    shard: str | None = None,
    emit: Callable[[Event], None] = lambda event: None,
) -> list[Replayed]:
    """Replay a step of an iteration, all its shards or one. Writes nothing into the ledger.

    Raises NothingToReplay, RunDiffers where data, model or user code are no longer those of the run, and the errors of
    the step.
    """
    owner = ledger.owner(index)
    wanted = [commit for commit in owner.commits(index) if commit.step is step and shard in (None, commit.shard)]
    if not wanted:
        which = step if shard is None else f"{step}.{shard}"
        raise NothingToReplay(f"run {owner.run!r} has no commit {index:06d}/{which}")
    alone = step not in _USING_OTHER_ENGINES
    with (
        Layouts(owner, emit, trains_only=alone) as layouts,
        TemporaryDirectory(prefix="cairn-replay-") as folder,
    ):
        run = layouts.of(wanted[0])
        runner = Replaying(run, {step}, shard, open_store(folder), layout_of=layouts.of)
        with suppress(_EndOfLedger):
            _walk(run, runner, index)
    return runner.replayed


def replay_all(
    ledger: Ledger,
    steps: Collection[Step] = frozenset(Step),
    on_replayed: Callable[[Replayed], None] = lambda replayed: None,
    emit: Callable[[Event], None] = lambda event: None,
) -> list[Replayed]:
    """Replay every committed step of the kinds `steps`, in their original order, including iterations shared with a
    parent.

    Engines are started once for each run that contributed iterations and each of its layouts, and weights carry over
    from one iteration to the next. `on_replayed` is called with each replayed step.

    Steps that cannot be replayed, because their files are retired or redacted, are in the results with the reason.
    Weights that cannot be reproduced are a difference, and the next step begins from a checkpoint. Raises RunDiffers as
    `replay`.
    """
    replayed: list[Replayed] = []
    numbers = ledger.iterations()
    for name in dict.fromkeys(ledger.owner(index).run for index in numbers):
        own = [index for index in numbers if ledger.owner(index).run == name]
        owner, alone = ledger.owner(own[0]), _USING_OTHER_ENGINES.isdisjoint(steps)
        with Layouts(owner, emit, trains_only=alone) as layouts:
            for index in own:
                with TemporaryDirectory(prefix="cairn-replay-") as folder:
                    run, scratch = layouts.any(), open_store(folder)
                    runner = Replaying(run, steps, None, scratch, on_replayed, True, layouts.of)
                    try:
                        _walk(run, runner, index)
                    except _EndOfLedger:
                        pass
                    except Retired as error:  # inputs of the steps
                        rest = Replayed(name=f"{index:06d}", skipped=str(error))
                        runner.replayed.append(rest)
                        on_replayed(rest)
                replayed += runner.replayed
    return replayed


def newest_update(ledger: Ledger) -> Commit:
    """Return the train step that produced a run's newest weights. Raises NothingToReplay if there is none yet."""
    ledger.manifest.require_own("weights")
    for index in reversed(ledger.iterations()):
        if (trained := ledger.find(index, Step.TRAIN)) is not None:
            return trained
    raise NothingToReplay(f"run {ledger.run!r} has trained on nothing yet: its weights are the initial ones")


def replayed_weights(trained: Commit, replayed: Collection[Replayed]) -> Weights:
    """Return the conclusion for the weights of a train step, from the results of `replay_all` with `UPDATES`."""
    updates = [one for one in replayed if one.name.partition("/")[2] in ("", Step.TRAIN)]
    differs_at = next((one.name for one in replayed if one.differences), None)
    done = any(one.name == trained.name and one.skipped is None for one in updates)
    assert trained.weight_version_out is not None
    assert trained.state_digest is not None
    return Weights(
        iteration=trained.iteration,
        weight_version=trained.weight_version_out,
        state_digest=trained.state_digest,
        same=False if differs_at is not None else True if done else None,
        differs_at=differs_at,
        not_done_again=sum(one.skipped is not None for one in updates),
    )


def _walk(run: RunContext, runner: Replaying, index: int) -> None:
    """Execute the steps of an iteration, as far as its driver could have executed them.

    In a streaming run, before the previous batch is selected: only the admission. Before the previous update: the batch
    and the advantages.
    """
    if run.config.rollout.pipeline == "streaming" and index and find_selection(run, index - 1) is None:
        admit(run, runner, index)
    elif index and run.find(index - 1, Step.TRAIN) is None:
        up_to_learning(run, runner, index)
    else:
        iteration(run, runner, index)


@contextmanager
def read_only_context(
    ledger: Ledger, emit: Callable[[Event], None], *, trains_only: bool = False, made: Commit | None = None
) -> Iterator[RunContext]:
    """Yield a context that reads a run as its driver does, but owns nothing of it.

    Args:
        trains_only: see `Fleet.start`.
        made: a commit in whose layout of ranks and engines the context works; by default in the newest.
    """
    config = recorded_config(ledger, made=made)
    sources = Sources.open(config, ledger.terms.inputs)
    differing = input_differences(ledger.terms.inputs, sources.digests)
    if differing:
        with adding_stale_steps(ledger.store, ledger.run, config, sources.digests):
            raise RunDiffers(ledger.run, differing)
    with ExitStack() as stack:
        started: list[Fleet] = []

        def fleet() -> "Fleet":
            if not started:
                # Unique for each replay: on a joined cluster a later replay would otherwise take over the engines.
                name = f"{fleet_name(ledger.store, ledger.run)}-replay-{uuid4().hex[:8]}"
                steps = total_steps(ledger, config)
                starting = starting_fleet(config, name, steps, sources.digests, None, trains_only=trains_only)
                started.append(stack.enter_context(starting)())
            return started[0]

        yield sources.context(
            config, ledger, fleet, open_graders(config, stack, ledger.store, lambda: fleet().scorer), emit
        )


class _EndOfLedger(Exception):
    """The iteration has no further commits."""


class _Done:
    """A completed step; a commit of None means that the ledger has none."""

    def __init__(self, commit: Commit | None) -> None:
        self._commit = commit

    def result(self) -> Commit:
        if self._commit is None:
            raise _EndOfLedger
        return self._commit

    def add_done_callback(self, fn: Callable[[Any], None], /) -> None:
        fn(self)
