"""Plans and kinds of rollout engines, known to the driver before they run: how many there are, their devices, and what
their kind can do.

All values are plain: neither this module nor the description of a kind loads PyTorch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

from cairn.configs.engines import reader_of
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import view
from cairn.engines.types.errors import BadModel


@dataclass(frozen=True)
class EnginePlan:
    """Plan of one engine. A kind may add to it; the plan is passed on to where the engine is made."""

    nnodes: int = 1
    """Number of machines, with one actor on each. Calls for the engine go to the first machine's actor."""
    num_gpus: float = 0
    """GPUs on each machine."""

    @property
    def device(self) -> str:
        """Device type that the engine computes on. Its process sees only its own devices."""
        return "cuda" if self.num_gpus > 0 else "cpu"


@dataclass(frozen=True)
class Place:
    """Place of a process of an engine."""

    host: str = "127.0.0.1"
    """Address of its machine, on which it listens."""
    node_rank: int = 0
    dist_init_addr: str | None = None
    """`host:port` on the first machine at which the processes of an engine meet; None for a single process."""


@dataclass(frozen=True)
class LaunchPlan:
    """All engines of a run, and the router in front of them."""

    engines: tuple[EnginePlan, ...]
    router: Mapping[str, Any] | None = None
    """Options of the router, without addresses; None without a router."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of rollout engine."""

    engine: str
    """`module:name` of the function that makes an engine in its process. Its arguments are the model folder,
    RolloutConfig, EnginePlan, Place, the log file, seconds until the engine must serve, and seconds of a call. Raises
    BadModel, EngineDied and EngineTimeout."""
    plan: Callable[[RolloutConfig, bool], LaunchPlan]
    """Function that returns the plan of a configuration. Its second argument is whether the engines release their
    memory in turns."""
    options: tuple[str, ...] = ()
    """Options of `rollout` that only this kind reads."""
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()
    """Function that returns sentences on what the kind cannot do, before anything starts."""
    layout_problems: Callable[[RolloutConfig], Iterable[str]] = lambda config: ()
    """Function that returns sentences on engines that cannot be laid out as configured. It needs no installation."""
    router: str | None = None
    """`module:name` of the function that makes a router in front of engines of this kind. Its arguments are its
    options, RolloutConfig, the address to listen on, the log file, and seconds until the router must serve."""
    spans_gpus: bool = False
    """Whether one engine may compute on several GPUs."""
    reports_checksum: Callable[[RolloutConfig], bool] = lambda config: False
    """Function that returns whether engines report a checksum of the weights of an update. Where an engine returns none
    nevertheless, nothing is compared."""
    holds_as_stored: bool = False
    """Whether an engine holds weights in the format of the model folder, quantised or not, rather than dequantised."""
    reports_loaded: bool = False
    """Whether an engine can report a checksum of what it made of the weights (`LoadChecked`)."""
    copies_stored: bool = False
    """Whether an engine keeps a copy on the host of the weights that it reads from a store."""
    takes_broadcasts: bool = False
    """Whether an engine's processes join a group in which the trainer broadcasts weights."""
    maps_gpu_memory: bool = False
    """Whether an engine maps weights from the memory of GPUs that it shares with training."""
    reserves_cache: bool = False
    """Whether an engine on GPUs takes a fixed part of their memory for keys and values when it starts."""
    caches_prefixes: bool = False
    """Whether an engine counts the tokens that it need not compute again, because it has seen the beginning of a prompt
    before."""
    bounded_by: str = "rollout.max_running_requests"
    """The option that bounds how many samples an engine generates at a time."""
    permitted: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Keys that a store may set in the kind's own options that are mappings, by the option's name: see
    `cairn.flows.driver.trust`."""


# Known rollout engines. Each has a folder, whose `kind` describes it, and a line in `rollout.engine`.


NAMES: tuple[str, ...] = get_args(RolloutConfig.model_fields["engine"].annotation)
"""Names that `rollout.engine` may have."""


def kind_of(engine: str) -> EngineKind:
    """Return the kind of the engine that `rollout.engine` names."""
    return import_module(f"cairn.engines.rollout.{engine}.kind").KIND


def served_model(config: RunConfig) -> tuple[str, str]:
    """Return the model folder that rollout engines load, and the name of its digest in a run's manifest."""
    other = config.rollout.model_path
    if other is None or not kind_of(config.rollout.engine).holds_as_stored:
        return config.model.path, "model"
    return other, "rollout_model"


def rounds_weights(config: RunConfig) -> bool:
    """Return whether rollout engines compute with rounded weights, so that a publication's digest does not determine
    their samples; also where this cannot be read here."""
    if not kind_of(config.rollout.engine).holds_as_stored:
        return False
    from cairn.engines.models.quantized import quantization_of  # imports PyTorch

    try:
        return quantization_of(Path(served_model(config)[0])) is not None
    except (BadModel, OSError, ValueError):
        return True


def make_engine(model_path: str, config: RolloutConfig, *args: Any) -> Any:
    """Make the engine that `rollout.engine` names in this process, and return it; see `EngineKind.engine`."""
    config = view(config, reader_of("rollout"), "rollout")
    module, _, name = kind_of(config.engine).engine.partition(":")
    return getattr(import_module(module), name)(model_path, config, *args)
