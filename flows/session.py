"""Open a run: from its name to a live RunContext, every check before anything expensive starts.

    store probed → model, data and graders checked → run created or opened, its configuration and inputs compared
    → lease taken → a fork's restore point made where it needs one → engines start in the background

Whatever ends the driver, the lease says how; a driver that was killed says nothing, and its successor finds its process
gone.
"""

import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from cairn.configs.digest import digest
from cairn.configs.errors import ConfigError
from cairn.configs.kinds import user_code
from cairn.configs.loader import from_manifest, in_recorded_words
from cairn.configs.plugins import load_callable
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import Reader, view
from cairn.engines.fingerprint import cpu_model, installed
from cairn.engines.fleet.fencing import Claim, Tenure
from cairn.engines.models import check_model_folder, context_length, folder_digest
from cairn.flows.events import Event
from cairn.flows.preemption import OnLease, Preempted
from cairn.flows.trust import recorded_config
from cairn.flows.validation import load_tokenizer, setup_problems
from cairn.storage import canonical, layout
from cairn.storage.commits import FORMAT, Environment, Step
from cairn.storage.errors import RunDiffers, StoreError
from cairn.storage.leases import Lease, Outcome
from cairn.storage.ledger import Ledger
from cairn.storage.store import Store, open_store, probe
from cairn.tasks.checkpoint import checkpoint
from cairn.tasks.context import RunContext
from cairn.tasks.data import PromptData
from cairn.tasks.events import Message
from cairn.tasks.plugin_sources import defining_file_digest, source_digest
from cairn.tasks.recovery import ReplayDiverged
from cairn.tasks.reward import reward
from cairn.tasks.rewards.pool import GraderPool
from cairn.tasks.rules import untold
from cairn.tasks.selection import last_selection
from cairn.tasks.stale_commits import stale_steps
from cairn.tasks.steps import RULES
from cairn.tasks.train import train
from cairn.tasks.versions import weight_version_after

if TYPE_CHECKING:
    from cairn.engines.fleet.fleet import Fleet

DRIVER = ("numpy", "pyarrow", "tokenizers", "transformers", "math-verify", "latex2sympy2-extended", "sympy", "prefect")
"""Packages that the steps of the driver and its graders rest on."""
UNTOLD = (
    "Run {run} goes on as it began: tokens are drawn from a part of the vocabulary and scored over all of it, which "
    "biases the gradient; a fork mends that, `cairn fork {run}@ITER NEW --set rollout.rollout_top_p=1` ({why})"
)


@contextmanager
def open_run(
    store_url: str,
    name: str,
    config: RunConfig | None,
    *,
    takeover: bool = False,
    emit: Callable[[Event], None] = lambda event: None,
    on_lease: OnLease = lambda lease, grace_period: None,
) -> Iterator[RunContext]:
    """Own the run `name` for the length of the block, with engines starting in the background.

    `config` creates the run, or must equal the configuration it has; None goes on with the ledger's. Raises
    StoreRefused, ConfigError, BadData, BadPlugin, RunDiffers and LeaseHeld before anything starts.
    """
    store = open_store(store_url)
    probe(store)
    given = config
    began = FORMAT
    if config is None or store.exists(layout.run_manifest(name)):
        recorded = Ledger.open(store, name)
        began = recorded.manifest.schema_version
        config = recorded_config(recorded) if config is None else in_recorded_words(config, recorded.manifest.config)
    sources = Sources.open(config, began)
    with telling_what_is_stale(store, name, config, sources.digests):
        ledger = Ledger.create(store, name, config, sources.digests, rules=RULES)
    with ExitStack() as stack:
        lease = ledger.acquire(takeover)
        stack.push(_releasing(lease))
        stack.enter_context(_divergence_is_the_holders(lease))
        on_lease(lease, config.operations.grace_period)
        if why := untold(config.rollout, began):
            emit(Message(UNTOLD.format(run=name, why=why), "warning"))
        graders = open_graders(config, stack)
        if needs_restore_point(ledger, config):
            make_restore_point(ledger, config, sources, emit, given)
        tenure = Tenure(Claim(ledger.manifest.identity, lease.epoch), lease.check)

        def tell(sentence: str) -> None:
            emit(Message(sentence, "warning"))

        fleet = stack.enter_context(
            starting_fleet(config, fleet_name(store, name), total_steps(ledger, config), sources.digests, tenure, tell)
        )
        yield sources.context(config, ledger, fleet, graders, emit)


@dataclass(frozen=True)
class Sources:
    """What a run reads from outside its ledger."""

    tokenizer: Any
    data: PromptData
    benchmarks: dict[str, PromptData]
    digests: dict[str, str]
    """Of all of it, and of models and user code; the run's manifest fixes them."""

    @classmethod
    def open(cls, config: RunConfig, began: int = FORMAT) -> "Sources":
        """`began`: format of the run's manifest. Raises ConfigError, BadModel, BadData and BadPlugin."""
        problems = setup_problems(config, began)
        if problems:
            raise ConfigError(problems)
        tokenizer = load_tokenizer(config.model.path)
        data = PromptData.open(config.data, config.data.path, tokenizer)
        benchmarks = {b.name: PromptData.open(b, b.path, tokenizer) for b in config.eval.benchmarks}
        for benchmark in benchmarks.values():
            benchmark.require_all()
        return cls(tokenizer, data, benchmarks, input_digests(config, data, benchmarks))

    def context(
        self,
        config: RunConfig,
        ledger: Ledger,
        fleet: "Callable[[], Fleet]",
        graders: dict[str | None, GraderPool],
        emit: Callable[[Event], None],
    ) -> RunContext:
        """A live run that reads from here."""
        return RunContext(
            config,
            ledger,
            fleet=fleet,
            tokenizer=self.tokenizer,
            data=self.data,
            max_prompt_len=config.rollout.rollout_max_prompt_len or longest_prompt(config),
            benchmarks=self.benchmarks,
            graders=graders,
            environment=environment(),
            emit=emit,
        )


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


def needs_restore_point(ledger: Ledger, config: RunConfig) -> bool:
    """Whether a run is a fork that trains otherwise than its parent did, from weights that no checkpoint holds: they
    can only be had by replay under the parent's configuration."""
    if ledger.parent is None:
        return False
    last = ledger.first_iteration - 1
    before = from_manifest(ledger.owner(last).manifest.config)
    same = digest(config, train.options) == digest(before, train.options)
    return not same and any(ledger.find(i, Step.CHECKPOINT) is None for i in _sampled_from(ledger))


def make_restore_point(
    ledger: Ledger,
    config: RunConfig,
    sources: Sources,
    emit: Callable[[Event], None],
    given: RunConfig | None = None,
) -> None:
    """Commit checkpoints of the last iterations that a fork shares, all that it samples from, by engines with its
    parent's configuration, in the fork's cluster. `given`: the fork's recipe, where the user gave one. Raises
    ConfigError where a store must not ask for what the parent's configuration does."""
    last = ledger.first_iteration - 1
    owner = ledger.owner(last)
    before = recorded_config(owner, config, given)
    emit(Message(f"Restoring the weights of iteration {last} as run {owner.run} trained them"))
    # This driver's alone, and gone with it on a joined cluster too: a successor may need their room, and not them.
    name = f"{fleet_name(ledger.store, ledger.run)}-restore-{uuid4().hex[:8]}"
    with starting_fleet(before, name, total_steps(owner, before), owner.manifest.inputs, None) as fleet:
        run = sources.context(before, ledger, fleet, {}, emit)
        for index in _sampled_from(ledger):
            if run.find(index, Step.CHECKPOINT) is None:
                checkpoint(run, index, None, run.committed(index, Step.TRAIN), last_selection(run, index))


def _sampled_from(ledger: Ledger) -> range:
    """The iterations that a fork shares whose weights its own ones sample from."""
    return range(max(0, ledger.first_iteration - 1 - ledger.lag), ledger.first_iteration)


def total_steps(ledger: Ledger, config: RunConfig) -> int:
    """Optimizer steps of the whole run, a fork's shared ones included."""
    return weight_version_after(ledger, config.rollout.num_rollout - 1)


def longest_prompt(config: RunConfig) -> int:
    """Longest prompt, in tokens, that leaves room in the context for the longest response."""
    return context_length(check_model_folder(config.model.path)) - config.rollout.rollout_max_response_len


def input_digests(config: RunConfig, data: PromptData, benchmarks: Mapping[str, PromptData]) -> dict[str, str]:
    """Digests of everything that a run reads from outside its ledger; its manifest fixes them."""
    digests = {"data": data.fingerprint}
    digests |= {name: folder_digest(Path(path)) for name, path in config.model.folders.items()}
    digests["eval"] = canonical.digest({name: benchmark.fingerprint for name, benchmark in benchmarks.items()})
    for option, path in user_code(config).items():
        digests[option] = defining_file_digest(load_callable(path))
        digests[f"{option}:modules"] = source_digest(path)
    return digests


def open_graders(config: RunConfig, stack: ExitStack) -> dict[str | None, GraderPool]:
    """The grader of the training samples under None, those of the benchmarks under their names."""
    reader = Reader("the grader", "`reads` of reward in cairn.tasks.reward", reward.reads)

    def opened(own: RewardConfig) -> GraderPool:
        return stack.enter_context(GraderPool(view(own, reader, "reward"), config.retry.grader))

    graders: dict[str | None, GraderPool] = {None: opened(config.reward)}
    for benchmark in config.eval.benchmarks:
        own = config.reward
        if benchmark.rm_type is not None:
            own = own.model_copy(update={"rm_type": benchmark.rm_type, "custom_rm_path": None})
        same = own == config.reward
        graders[benchmark.name] = graders[None] if same else opened(own)
    return graders


@contextmanager
def starting_fleet(
    config: RunConfig,
    name: str,
    total_steps: int,
    digests: Mapping[str, str],
    tenure: Tenure | None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> "Iterator[Callable[[], Fleet]]":
    """Engines that start beside whatever the block does, and are closed with it; calling what it yields awaits them.
    Their models must have these digests. `tenure`, `tell`: see `Fleet.start`."""
    from cairn.engines.fleet.fleet import Fleet  # Ray takes a second to import

    deadline = config.fleet.start_timeout * 2
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        fleet = pool.submit(
            Fleet.start, config, name=name, total_steps=total_steps, model_digests=digests, tenure=tenure, tell=tell
        )
        try:
            yield lambda: fleet.result(timeout=deadline)
        finally:
            if fleet.exception(timeout=deadline) is None:
                fleet.result().close()


def fleet_name(store: Store, run: str) -> str:
    """Name of the run's actors, unlike that of any other run in any other store."""
    return f"{run}-{canonical.digest(store.url)[:8]}"


def environment() -> Environment:
    """Where the driver and its graders compute, as far as it changes bits; engines tell their own."""
    return Environment(device=cpu_model(), threads=1, host=platform.node(), versions=installed(DRIVER))


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
    return Outcome.FAILED if issubclass(kind, Exception) else Outcome.STOPPED
