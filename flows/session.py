"""Open a run: from its name to a live RunContext, every check before anything expensive starts.

    store probed → model, data and graders checked → run created or opened, its configuration and inputs compared
    → lease taken → engines start in the background

Whatever ends the driver, the lease says how; a driver that was killed says nothing, and its successor finds its process
gone.
"""

import hashlib
import platform
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from configs.errors import ConfigError
from configs.schema.run import RunConfig
from engines.models import check_model_folder, context_length
from flows.events import Event
from flows.validation import load_tokenizer, setup_problems
from storage import canonical
from storage.commits import Environment
from storage.leases import Lease, Outcome
from storage.ledger import Ledger
from storage.store import Store, open_store, probe
from tasks.context import RunContext
from tasks.data import PromptData
from tasks.rewards.pool import GraderPool

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
        config = RunConfig.model_validate(Ledger.open(store, name).manifest.config)
    problems = setup_problems(config)
    if problems:
        raise ConfigError(problems)
    tokenizer = load_tokenizer(config.model.path)
    data = PromptData.open(config.data, config.data.path, tokenizer)
    benchmarks = {b.name: PromptData.open(b, b.path, tokenizer) for b in config.eval.benchmarks}
    ledger = Ledger.create(store, name, config.model_dump(mode="json"), inputs=input_digests(config, data, benchmarks))
    with ExitStack() as stack:
        lease = ledger.acquire(takeover)
        stack.push(_releasing(lease))
        graders = open_graders(config, stack)
        fleet = stack.enter_context(starting_fleet(config, fleet_name(store, name)))
        yield RunContext(
            config,
            ledger,
            fleet=fleet,
            tokenizer=tokenizer,
            data=data,
            max_prompt_len=config.rollout.rollout_max_prompt_len or longest_prompt(config),
            benchmarks=benchmarks,
            graders=graders,
            environment=environment(config),
            emit=emit,
        )


def longest_prompt(config: RunConfig) -> int:
    """Longest prompt, in tokens, that leaves room in the context for the longest response."""
    return context_length(check_model_folder(config.model.path)) - config.rollout.rollout_max_response_len


def input_digests(config: RunConfig, data: PromptData, benchmarks: Mapping[str, PromptData]) -> dict[str, str]:
    """Digests of everything that a run reads from outside its ledger; its manifest fixes them."""
    digests = {"data": data.fingerprint, "model": folder_digest(Path(config.model.path))}
    digests["eval"] = canonical.digest({name: benchmark.fingerprint for name, benchmark in benchmarks.items()})
    if config.model.ref_path is not None:
        digests["ref_model"] = folder_digest(Path(config.model.ref_path))
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
        if benchmark.rm_type in (None, config.reward.rm_type):
            graders[benchmark.name] = graders[None]
        else:
            own = config.reward.model_copy(update={"rm_type": benchmark.rm_type, "custom_rm_path": None})
            graders[benchmark.name] = stack.enter_context(GraderPool(own))
    return graders


@contextmanager
def starting_fleet(config: RunConfig, name: str) -> "Iterator[Future[Fleet]]":
    """Engines that start beside whatever the block does, and are closed with it."""
    from engines.fleet import Fleet  # Ray takes a second to import

    deadline = config.fleet.start_timeout * 2
    total_steps = config.rollout.num_rollout * config.training.num_steps_per_rollout
    with ThreadPoolExecutor(1, thread_name_prefix="fleet") as pool:
        fleet = pool.submit(Fleet.start, config, name=name, total_steps=total_steps)
        try:
            yield fleet
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
