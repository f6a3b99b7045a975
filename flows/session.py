"""Open a run: from its name to a live RunContext, every check before anything expensive starts.

    store probed → model, data and graders checked → run created or opened, its configuration and inputs compared
    → lease taken → a fork's restore point made where it needs one → engines start in the background

Whatever ends the driver, the lease says how; a driver that was killed says nothing, and its successor finds its process
gone.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from configs.digest import digest
from configs.errors import ConfigError
from configs.schema.run import RunConfig
from engines.models import check_model_folder, context_length
from flows.events import Event
from flows.iteration import last_selection
from flows.trust import recorded_config, user_code
from flows.validation import load_tokenizer, setup_problems
from storage import canonical
from storage.commits import Environment, Step
from storage.errors import RunDiffers
from storage.leases import Lease, Outcome
from storage.ledger import Ledger
from storage.store import Store, open_store, probe
from tasks.checkpoint import checkpoint
from tasks.context import RunContext
from tasks.data import PromptData
from tasks.events import Message
from tasks.plugins import load_callable, source_digest
from tasks.recovery import weight_version_after
from tasks.rewards.pool import GraderPool
from tasks.staleness import stale_steps
from tasks.train import train

if TYPE_CHECKING:
    from engines.fleet import Fleet

FINGERPRINTED = ("torch", "transformers", "tokenizers", "numpy", "pyarrow", "ray", "prefect")
"""Packages whose versions are part of every commit's environment."""


@contextmanager
def open_run(
    store_url: str,
    name: str,
    config: RunConfig | None,
    *,
    takeover: bool = False,
    emit: Callable[[Event], None] = lambda event: None,
) -> Iterator[RunContext]:
    """Own the run `name` for the length of the block, with engines starting in the background.

    `config` creates the run, or must equal the configuration it has; None goes on with the ledger's. Raises
    StoreRefused, ConfigError, BadData, BadPlugin, RunDiffers and LeaseHeld before anything starts.
    """
    store = open_store(store_url)
    probe(store)
    if config is None:
        config = recorded_config(Ledger.open(store, name))
    sources = Sources.open(config)
    with telling_what_is_stale(store, name, config, sources.digests):
        ledger = Ledger.create(store, name, config.model_dump(mode="json"), sources.digests)
    with ExitStack() as stack:
        lease = ledger.acquire(takeover)
        stack.push(_releasing(lease))
        graders = open_graders(config, stack)
        if needs_restore_point(ledger, config):
            make_restore_point(ledger, config, sources, emit)
        fleet = stack.enter_context(starting_fleet(config, fleet_name(store, name), total_steps(ledger, config)))
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
    def open(cls, config: RunConfig) -> "Sources":
        """Raises ConfigError, BadModel, BadData and BadPlugin."""
        problems = setup_problems(config)
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
            environment=environment(config),
            emit=emit,
        )


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
    before = RunConfig.model_validate(ledger.owner(last).manifest.config)
    same = digest(config, train.reads) == digest(before, train.reads)
    return not same and ledger.find(last, Step.CHECKPOINT) is None


def make_restore_point(ledger: Ledger, config: RunConfig, sources: Sources, emit: Callable[[Event], None]) -> None:
    """Commit a checkpoint of the last iteration that a fork shares, by engines with its parent's configuration."""
    last = ledger.first_iteration - 1
    owner = ledger.owner(last)
    before = RunConfig.model_validate(owner.manifest.config)
    emit(Message(f"Restoring the weights of iteration {last} as run {owner.run} trained them"))
    name = f"{fleet_name(ledger.store, ledger.run)}-restore"
    with starting_fleet(before, name, total_steps(owner, before)) as fleet:
        run = sources.context(before, ledger, fleet, {}, emit)
        checkpoint(run, last, None, run.committed(last, Step.TRAIN), last_selection(run, last))


def total_steps(ledger: Ledger, config: RunConfig) -> int:
    """Optimizer steps of the whole run, a fork's shared ones included."""
    return weight_version_after(ledger, config.rollout.num_rollout - 1)


def longest_prompt(config: RunConfig) -> int:
    """Longest prompt, in tokens, that leaves room in the context for the longest response."""
    return context_length(check_model_folder(config.model.path)) - config.rollout.rollout_max_response_len


def input_digests(config: RunConfig, data: PromptData, benchmarks: Mapping[str, PromptData]) -> dict[str, str]:
    """Digests of everything that a run reads from outside its ledger; its manifest fixes them."""
    digests = {"data": data.fingerprint, "model": folder_digest(Path(config.model.path))}
    digests["eval"] = canonical.digest({name: benchmark.fingerprint for name, benchmark in benchmarks.items()})
    digests |= {option: source_digest(load_callable(path)) for option, path in user_code(config).items()}
    if config.model.ref_path is not None:
        digests["ref_model"] = folder_digest(Path(config.model.ref_path))
    if config.model.teacher_path is not None:
        digests["teacher_model"] = folder_digest(Path(config.model.teacher_path))
    if config.model.critic_path is not None:
        digests["critic_model"] = folder_digest(Path(config.model.critic_path))
    return digests


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and contents of a model folder's files; large files are read in parallel."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        digests = list(pool.map(digest, files))
    return canonical.digest(
        [[str(path.relative_to(folder)), value] for path, value in zip(files, digests, strict=True)]
    )


def open_graders(config: RunConfig, stack: ExitStack) -> dict[str | None, GraderPool]:
    """The grader of the training samples under None, those of the benchmarks under their names."""
    graders: dict[str | None, GraderPool] = {None: stack.enter_context(GraderPool(config.reward))}
    for benchmark in config.eval.benchmarks:
        own = config.reward
        if benchmark.rm_type is not None:
            own = own.model_copy(update={"rm_type": benchmark.rm_type, "custom_rm_path": None})
        same = own == config.reward
        graders[benchmark.name] = graders[None] if same else stack.enter_context(GraderPool(own))
    return graders


@contextmanager
def starting_fleet(config: RunConfig, name: str, total_steps: int) -> "Iterator[Callable[[], Fleet]]":
    """Engines that start beside whatever the block does, and are closed with it; calling what it yields awaits them."""
    from engines.fleet import Fleet  # Ray takes a second to import

    deadline = config.fleet.start_timeout * 2
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        fleet = pool.submit(Fleet.start, config, name=name, total_steps=total_steps)
        try:
            yield lambda: fleet.result(timeout=deadline)
        finally:
            if fleet.exception(timeout=deadline) is None:
                fleet.result().close()


def fleet_name(store: Store, run: str) -> str:
    """Name of the run's actors, unlike that of any other run in any other store."""
    return f"{run}-{canonical.digest(store.url)[:8]}"


def environment(config: RunConfig) -> Environment:
    """Where the run computes, as far as it changes bits."""
    gpus = config.training.num_gpus_per_rank > 0
    device = _gpu_name() if gpus else platform.processor() or platform.machine()
    versions = {package: version(package) for package in FINGERPRINTED}
    return Environment(
        device=device,
        threads=config.training.num_threads,
        host=platform.node(),
        versions={"python": platform.python_version(), **versions},
    )


def _gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def _releasing(
    lease: Lease,
) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
    def release(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        stopped = kind is not None and not issubclass(kind, Exception)
        lease.release(Outcome.STOPPED if stopped else Outcome.FAILED if kind is not None else Outcome.COMPLETED)

    return release
