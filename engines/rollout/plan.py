"""What the driver knows of rollout engines before they run: how many, on what, and what their kind can do.

Plain values: nothing here, and nothing that a kind is described with, loads PyTorch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, get_args

from cairn.configs.engines import reader_of
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import RunConfig
from cairn.configs.view import view


@dataclass(frozen=True)
class EnginePlan:
    """One engine. A kind may plan more of it, which is passed on to where it is made."""

    nnodes: int = 1
    """Machines, with one actor on each; the first one's speaks for it."""
    num_gpus: float = 0
    """GPUs on each machine."""

    @property
    def device(self) -> str:
        """Where it computes; its process sees only the devices that are its own."""
        return "cuda" if self.num_gpus > 0 else "cpu"


@dataclass(frozen=True)
class Place:
    """Where a process of an engine runs."""

    host: str = "127.0.0.1"
    """Its machine's address, on which it listens."""
    node_rank: int = 0
    dist_init_addr: str | None = None
    """`host:port` on the first machine at which the processes of an engine meet; None where there is one."""


@dataclass(frozen=True)
class LaunchPlan:
    """All engines of a run, and the router before them."""

    engines: tuple[EnginePlan, ...]
    router: Mapping[str, Any] | None = None
    """Its options, addresses left out; None where there is none."""


@dataclass(frozen=True)
class EngineKind:
    """A kind of rollout engine."""

    engine: str
    """`module:name` of what makes one in its process, of model folder, RolloutConfig, EnginePlan, Place, file for what
    it has to say, seconds that it may take to serve, and seconds of a call. Raises BadModel, EngineDied and
    EngineTimeout."""
    plan: Callable[[RolloutConfig, bool], LaunchPlan]
    """What a configuration asks for; whether the engines are to give their memory away in turns."""
    options: tuple[str, ...] = ()
    """What it alone reads of `rollout`."""
    problems: Callable[[RunConfig], Iterable[str]] = lambda config: ()
    """Sentences on what it cannot do, before anything starts."""
    router: str | None = None
    """`module:name` of what makes a router before engines of this kind, of its options, RolloutConfig, the address that
    it listens on, file for what it has to say, and seconds that it may take to serve."""
    spans_gpus: bool = False
    """Whether one engine may compute on several GPUs."""
    tells_checksum: bool = False
    """Whether it can say which weights it holds."""
    holds_as_stored: bool = False
    """Whether it holds weights as the model folder does, quantised or not, rather than as what they stand for."""
    takes_broadcasts: bool = False
    """Whether its processes join a group in which the trainer broadcasts weights."""
    maps_gpu_memory: bool = False
    """Whether it takes weights from the memory of GPUs that it shares with training."""
    caches_prefixes: bool = False
    """Whether it counts tokens that it need not compute again, for it has seen a prompt's beginning before."""
    bounded_by: str = "rollout.max_running_requests"
    """The option that bounds how many samples it generates at a time."""
    permitted: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """What a store may set of options that are its own mappings, by their names: see `cairn.flows.driver.trust`."""


# Which rollout engines there are: a folder each, whose `kind` describes it, and the line of `rollout.engine`.


NAMES: tuple[str, ...] = get_args(RolloutConfig.model_fields["engine"].annotation)
"""What `rollout.engine` may name."""


def kind_of(engine: str) -> EngineKind:
    """What the driver knows of the engine that `rollout.engine` names."""
    found: EngineKind = import_module(f"cairn.engines.rollout.{engine}.kind").KIND
    return found


def make_engine(model_path: str, config: RolloutConfig, *args: Any) -> Any:
    """The engine that `rollout.engine` names, made in this process; see `EngineKind.engine`."""
    config = view(config, reader_of("rollout"), "rollout")
    module, _, name = kind_of(config.engine).engine.partition(":")
    return getattr(import_module(module), name)(model_path, config, *args)
