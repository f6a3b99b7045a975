"""Opening a run: from its name to a live RunContext, with every check before anything expensive starts.

    model, data and graders checked → run created or opened, its configuration and inputs compared
    → lease acquired → a fork's restore point made where it needs one → engines start in the background

The lease records how the driver ended. A killed driver records nothing, and its successor finds that the process is
gone.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING
from uuid import uuid4

from cairn.configs.digest import digest
from cairn.configs.engines import ENGINES, LAYOUT
from cairn.configs.errors import ConfigError, message_of
from cairn.configs.kinds import code_options, user_code
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fencing import Claim, Tenure
from cairn.flows.driver.approval import Withheld, require_not_withheld
from cairn.flows.driver.length import with_length
from cairn.flows.driver.preemption import OnLease, Preempted
from cairn.flows.driver.relayout import differences_of, in_layout, require_no_replay_of_another_layout
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.driver.trust import recorded_config, require_trusted
from cairn.flows.events import Event
from cairn.flows.reading.failure import RunFailure
from cairn.flows.reading.views import own_failure
from cairn.flows.text import shortened
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.leases import DriverFailure, Lease, Outcome, newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store import canonical
from cairn.storage.store.errors import RunDiffers, StoreError
from cairn.storage.store.store import Store
from cairn.tasks.durable.beside import StepProcess
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.plugin_sources import load_recorded
from cairn.tasks.durable.retries import GivenUp
from cairn.tasks.durable.selection import last_selection
from cairn.tasks.durable.versions import weight_version_after
from cairn.tasks.step_process import MODULE
from cairn.tasks.steps import rules, stale_steps
from cairn.tasks.trainer.checkpoint import checkpoint
from cairn.tasks.trainer.recovery import ReplayDiverged
from cairn.tasks.trainer.train import train

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet


_LONGEST_ERROR = 4000
"""Number of characters of an error that a lease records at most."""


# Engines of a run, started concurrently with work that needs no engine yet.


@contextmanager
def starting_fleet(
    config: RunConfig,
    name: str,
    total_steps: int,
    digests: Mapping[str, str],
    tenure: Tenure | None,
    report: Callable[[str], None] = lambda sentence: None,
    trains_only: bool = False,
    any_code: bool = False,
) -> "Iterator[Callable[[], Fleet]]":
    """Start engines in the background while the block runs, and close them at its end. Yields a function that waits for
    the fleet.

    The models must have the digests `digests`, and so must the user code of the training ranks, whenever these are
    started, unless it may be `any_code`. `tenure`, `report`, `trains_only`: see `Fleet.start`.
    """
    from cairn.engines.fleet.fleet import Fleet  # Ray takes a second to import

    deadline = config.fleet.start_timeout * 2
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        fleet = pool.submit(
            Fleet.start,
            config,
            name=name,
            total_steps=total_steps,
            model_digests=digests,
            load_code=None if any_code else _loading_code(config, digests),
            tenure=tenure,
            report=report,
            trains_only=trains_only,
        )
        try:
            yield lambda: fleet.result(timeout=deadline)
        finally:
            if fleet.exception(timeout=deadline) is None:
                fleet.result().close()


def _loading_code(config: RunConfig, digests: Mapping[str, str]) -> Callable[[], None] | None:
    """Return a function that loads the user code of training ranks in their processes, and refuses any other."""
    options = code_options(ENGINES["training"])
    named = {option: tuple(paths) for option, paths in user_code(config).items() if option in options}
    recorded = {paths: digests[f"{option}:modules"] for option, paths in named.items()}
    return partial(load_recorded, recorded, tuple(map(os.path.abspath, sys.path))) if recorded else None


def fleet_name(store: Store, run: str) -> str:
    """Return the name of the run's actors, unique across runs and stores."""
    return f"{run}-{canonical.digest(store.url)[:8]}"


def total_steps(ledger: Ledger, config: RunConfig) -> int:
    """Return the number of optimizer steps of the whole run, including those that a fork shares."""
    return weight_version_after(ledger, config.rollout.num_rollout - 1)


# Restore point of a fork whose training options differ from its parent's.


def needs_restore_point(ledger: Ledger, config: RunConfig) -> bool:
    """Whether a run is a fork whose training options differ from its parent's and whose weights are in no checkpoint.

    Such weights are only available by replay with the parent's configuration.
    """
    if ledger.parent is None:
        return False
    own = digest(config, train.options)
    return any(
        digest(ledger.config_of(_trained(ledger, index)), train.options) != own
        for index in _sampled_from(ledger)
        if ledger.find(index, Step.CHECKPOINT) is None
    )


def make_restore_point(
    ledger: Ledger,
    config: RunConfig,
    sources: Sources,
    emit: Callable[[Event], None],
    recipe: RunConfig | None = None,
) -> None:
    """Commit checkpoints of the last shared iterations of a fork, of all that it samples from.

    Engines with the parent's configuration compute them, in the fork's cluster. `recipe`: the fork's recipe, where the
    user passed one. Raises ConfigError where the parent's configuration contains what a store may not set.
    """
    wanted = [index for index in _sampled_from(ledger) if ledger.find(index, Step.CHECKPOINT) is None]
    layouts = {index: recorded_config(ledger.owner(index), config, recipe, _trained(ledger, index)) for index in wanted}
    for _, together in groupby(wanted, layouts.__getitem__):
        indices = list(together)
        owner, before = ledger.owner(indices[0]), layouts[indices[0]]
        emit(Message(f"Restoring the weights of iteration {indices[-1]} as run {owner.run} trained them"))
        # The name belongs to this driver alone. These actors end with it on a joined cluster too: a successor may need
        # their resources, but not the actors.
        name = f"{fleet_name(ledger.store, ledger.run)}-restore-{uuid4().hex[:8]}"
        steps, digests = total_steps(owner, before), owner.manifest.inputs
        # Whether today's code makes the parent's states is checked by their digests.
        with starting_fleet(before, name, steps, digests, None, any_code=True) as fleet:
            run = sources.context(before, ledger, fleet, {}, emit, recipe)
            for index in indices:
                checkpoint(run, index, None, run.committed(index, Step.TRAIN), last_selection(run, index))


def _trained(ledger: Ledger, index: int) -> Commit:
    commit = ledger.find(index, Step.TRAIN)
    assert commit is not None  # nothing else can be forked
    return commit


def _sampled_from(ledger: Ledger) -> range:
    """Return the shared iterations of a fork whose weights its own iterations sample from."""
    return range(max(0, ledger.first_iteration - 1 - ledger.lag), ledger.first_iteration)


@contextmanager
def open_run(
    store: Store,
    name: str,
    config: RunConfig | None,
    *,
    takeover: bool = False,
    relayout: Sequence[str] = (),
    emit: Callable[[Event], None] = lambda event: None,
    on_lease: OnLease = lambda lease, grace_period: None,
) -> Iterator[RunContext]:
    """Own the run `name` while the block runs; engines start in the background.

    `store` must support runs (`cairn.storage.opening.open_for_runs`). `config` creates the run, or must equal its
    stored configuration; None uses the stored one, with options of the layout set by `relayout`, each `a.b=value`
    (`cairn.flows.driver.relayout`). Raises ConfigError, BadData, BadPlugin, RunDiffers and LeaseHeld
    before anything starts, and Withheld where a person must approve the run first.
    """

    def warn(sentence: str) -> None:
        emit(Message(sentence, "warning"))

    config = None if config is None else with_length(config)
    recipe = config
    before = inputs = recorded = None
    if config is None or store.exists(layout.run_manifest(name)):
        recorded = Ledger.open(store, name)
        inputs = recorded.terms.inputs
        if config is None:
            before = recorded_config(recorded)
            config = in_layout(recorded, relayout) if relayout else before
    sources = Sources.open(config, inputs, warn)
    with adding_stale_steps(store, name, config, sources.digests):
        if recorded is None:
            ledger = Ledger.create(store, name, config, sources.digests, rules=rules(config))
        else:
            changing = LAYOUT if relayout else ()
            ledger = Ledger.open(store, name, config, sources.digests, rules(config), changing)
    if relayout or ledger.upgrades:
        require_no_replay_of_another_layout(ledger, config)
    require_not_withheld(ledger, config)
    with ExitStack() as stack:
        lease = ledger.acquire(takeover)
        given_up: list[GivenUp] = []
        stack.enter_context(_releasing(lease, given_up, lambda: is_resumable(ledger)))
        stack.enter_context(_lease_lost_over_divergence(lease))
        on_lease(lease, config.operations.grace_period)
        graders = open_graders(config, stack, store, lambda: fleet().scorer)
        if needs_restore_point(ledger, config):
            make_restore_point(ledger, config, sources, emit, recipe)
        tenure = Tenure(Claim(ledger.manifest.identity, lease.epoch), lease.check)

        fleet = stack.enter_context(
            starting_fleet(config, fleet_name(store, name), total_steps(ledger, config), sources.digests, tenure, warn)
        )
        context = sources.context(config, ledger, fleet, graders, emit, recipe)
        context.retries.given_up = given_up
        if relayout and before is not None:
            for option, then, now in differences_of(before, config):
                warn(f"{option} was {then}, is {now}: bits may differ from the next update on")
        beside = StepProcess(MODULE)
        stack.callback(beside.close)
        context.attach(beside)
        yield context


@contextmanager
def adding_stale_steps(store: Store, name: str, config: RunConfig, inputs: Mapping[str, str]) -> Iterator[None]:
    """Add to a RunDiffers the committed steps that do not match the passed configuration and inputs."""
    try:
        yield
    except RunDiffers as error:
        error.stale = stale_steps(Ledger.open(store, name), config, inputs)
        raise


@contextmanager
def _lease_lost_over_divergence(lease: Lease) -> Iterator[None]:
    """Raise LeaseLost instead of ReplayDiverged where another driver has acquired the run: the new owner decides what
    happens to it."""
    try:
        yield
    except ReplayDiverged:
        lease.check()
        raise


@contextmanager
def _releasing(
    lease: Lease, given_up: Sequence[GivenUp] = (), resumable: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Release the lease at the end of the block, with the block's outcome. `given_up`: steps that failed in it;
    `resumable`: see `DriverFailure`."""
    try:
        yield
    except BaseException as error:
        failed = isinstance(error, Exception) and not isinstance(error, Withheld | Preempted)
        outcome = Outcome.PREEMPTED if isinstance(error, Preempted) else Outcome.FAILED if failed else Outcome.STOPPED
        try:
            lease.release(outcome, driver_failure(error, given_up, resumable()) if failed else None)
        except StoreError as second:  # the caller gets the first error
            error.add_note(f"{type(second).__name__} meanwhile: {second}")
        raise
    lease.release(Outcome.COMPLETED)


def is_resumable(ledger: Ledger) -> bool:
    """Whether this process may continue a run from its ledger alone, without the recipe."""
    try:
        require_trusted(ledger.config, ledger.store)
    except ConfigError:
        return False
    return True


def driver_failure(error: BaseException, given_up: Sequence[GivenUp], resumable: bool) -> DriverFailure:
    """Return the record of an error that ends a driver, with the step that it ended."""
    kind, advice = type(error).__name__, getattr(error, "advice", None)
    what = message_of(error) if advice is None else str(error.args[0])
    what = shortened(what.strip() or kind, _LONGEST_ERROR)
    failure = DriverFailure(kind=kind, error=what, advice=advice, resumable=resumable)
    own = next((one for one in given_up if one.error is error), None)
    if own is None:
        return failure
    iteration, step, shard = own.place
    shards = [one for one in given_up if one.place[:2] == own.place[:2] and type(one.error) is type(error)]
    where = {"iteration": iteration, "step": str(step), "shards": len(shards) if shard else 0}
    return failure.model_copy(update={**where, "tries": own.tries})


def why_failed(store: Store, run: str, error: Exception, given_up: Sequence[GivenUp] = ()) -> RunFailure:
    """Return why this process could not drive a run: as the ledger has it, where it owned or owns the run."""
    with suppress(Exception):  # the store may be what failed
        lease = newest_lease(store, run)
        ending = None
        if lease is not None and lease.outcome is None and lease.holder.pid == os.getpid():
            ending = driver_failure(error, given_up, is_resumable(Ledger.open(store, run)))
        if (failure := own_failure(store, run, error, ending)) is not None:
            return failure
    return RunFailure(what=shortened(message_of(error), _LONGEST_ERROR) or type(error).__name__)
