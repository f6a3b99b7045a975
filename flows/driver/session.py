"""Open a run: from its name to a live RunContext, every check before anything expensive starts.

    model, data and graders checked → run created or opened, its configuration and inputs compared
    → lease taken → a fork's restore point made where it needs one → engines start in the background

Whatever ends the driver, the lease says how; a driver that was killed says nothing, and its successor finds its process
gone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType

from cairn.configs.loader import in_recorded_words
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.fencing import Claim, Tenure
from cairn.flows.driver.approval import Withheld, require_not_withheld
from cairn.flows.driver.length import with_length
from cairn.flows.driver.preemption import OnLease, Preempted
from cairn.flows.driver.restore_point import make_restore_point, needs_restore_point
from cairn.flows.driver.sources import Sources, open_graders
from cairn.flows.driver.starting import fleet_name, starting_fleet, total_steps
from cairn.flows.driver.trust import recorded_config
from cairn.flows.events import Event
from cairn.flows.reading.views import stands_in
from cairn.storage import layout
from cairn.storage.errors import RunDiffers, StoreError
from cairn.storage.leases import Lease, Outcome
from cairn.storage.ledger import Ledger
from cairn.storage.store import Store
from cairn.tasks.context import RunContext
from cairn.tasks.events import Message
from cairn.tasks.recovery import ReplayDiverged
from cairn.tasks.rules import untold
from cairn.tasks.stale_commits import stale_steps
from cairn.tasks.steps import rules

UNTOLD = (
    "Run {run} goes on as it began: tokens are drawn from a part of the vocabulary and scored over all of it, which "
    "biases the gradient; a fork mends that, `cairn fork {run}@ITER NEW --set rollout.rollout_top_p=1` ({why})"
)


@contextmanager
def open_run(
    store: Store,
    name: str,
    config: RunConfig | None,
    *,
    takeover: bool = False,
    emit: Callable[[Event], None] = lambda event: None,
    on_lease: OnLease = lambda lease, grace_period: None,
) -> Iterator[RunContext]:
    """Own the run `name` for the length of the block, with engines starting in the background.

    `store` can carry runs (`cairn.storage.store.open_for_runs`). `config` creates the run, or must equal the
    configuration it has; None goes on with the ledger's. Raises ConfigError, BadData, BadPlugin, RunDiffers and
    LeaseHeld before anything starts, and Withheld where somebody is to approve the run first.
    """
    config = None if config is None else with_length(config)
    given = config
    began, inputs = None, None
    if config is None or store.exists(layout.run_manifest(name)):
        recorded = Ledger.open(store, name)
        began, inputs = recorded.manifest.schema_version, recorded.terms.inputs
        config = recorded_config(recorded) if config is None else in_recorded_words(config, recorded.manifest.config)
    sources = Sources.open(config, began, inputs)
    with telling_what_is_stale(store, name, config, sources.digests):
        ledger = Ledger.create(store, name, config, sources.digests, rules=rules(config))
    require_not_withheld(ledger, config, stands_in(ledger, config))
    with ExitStack() as stack:
        lease = ledger.acquire(takeover)
        stack.push(_releasing(lease))
        stack.enter_context(_divergence_is_the_holders(lease))
        on_lease(lease, config.operations.grace_period)
        if why := untold(config.rollout, began):
            emit(Message(UNTOLD.format(run=name, why=why), "warning"))
        graders = open_graders(config, stack, store, lambda: fleet().scorer)
        if needs_restore_point(ledger, config):
            make_restore_point(ledger, config, sources, emit, given)
        tenure = Tenure(Claim(ledger.manifest.identity, lease.epoch), lease.check)

        def tell(sentence: str) -> None:
            emit(Message(sentence, "warning"))

        fleet = stack.enter_context(
            starting_fleet(config, fleet_name(store, name), total_steps(ledger, config), sources.digests, tenure, tell)
        )
        yield sources.context(config, ledger, fleet, graders, emit, given)


def as_recorded(store: Store, name: str, config: RunConfig) -> RunConfig:
    """A configuration that was given, in the words of the run's manifest if there is a run of that name."""
    try:
        return in_recorded_words(config, Ledger.open(store, name).manifest.config)
    except FileNotFoundError:
        return config


@contextmanager
def telling_what_is_stale(store: Store, name: str, config: RunConfig, inputs: Mapping[str, str]) -> Iterator[None]:
    """Add to a RunDiffers which committed steps do not match what was given."""
    try:
        yield
    except RunDiffers as error:
        error.stale = stale_steps(Ledger.open(store, name), config, inputs)
        raise


@contextmanager
def _divergence_is_the_holders(lease: Lease) -> Iterator[None]:
    """Raise LeaseLost in the place of ReplayDiverged where another driver has the run by now: what becomes of it is for
    that one to decide."""
    try:
        yield
    except ReplayDiverged:
        lease.check()
        raise


def _releasing(
    lease: Lease,
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    def release(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            lease.release(_outcome(kind))
        except StoreError as second:
            if error is None:
                raise
            error.add_note(f"{type(second).__name__} meanwhile: {second}")  # its caller must hear of the first

    return release


def _outcome(kind: type[BaseException] | None) -> Outcome:
    if kind is None:
        return Outcome.COMPLETED
    if issubclass(kind, Preempted):
        return Outcome.PREEMPTED
    failed = issubclass(kind, Exception) and not issubclass(kind, Withheld)
    return Outcome.FAILED if failed else Outcome.STOPPED
