"""The classes whose instances are the fleet's actors: one engine each, made and called in the actor's process.

They import an engine only where they make it, so that the driver can name these classes without loading PyTorch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil
import ray

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.errors import EngineError
from cairn.engines.fleet.fencing import Claim, FencedActor
from cairn.engines.fleet.slots import Slot
from cairn.engines.rollout.samples import SampleEngine
from cairn.engines.rollout.sglang.launch_plan import EnginePlan, Place, Worker
from cairn.engines.rollout.sglang.route import Route
from cairn.engines.rollout.user_code import GenerateFunction
from cairn.engines.trajectories import GeneratedSample, SampleRequest
from cairn.engines.types import Completion, GenerateRequest, Position, Role, SamplingParams, TrainBatch, TrainResult
from cairn.engines.weights.source import WeightSource
from cairn.engines.weights.target import WeightTarget

if TYPE_CHECKING:
    import numpy as np

    from cairn.engines.rollout.base import RolloutEngine
    from cairn.engines.rollout.sglang.launch import FurtherRank
    from cairn.engines.rollout.sglang.router import Router
    from cairn.engines.training.base import TrainingEngine
    from cairn.storage.commits import Environment
    from cairn.storage.store import StoredFile


def device_of(num_gpus: float) -> str:
    """Where an engine with so many GPUs computes; an actor sees only those that are its own."""
    return "cuda" if num_gpus > 0 else "cpu"


class _Placed(FencedActor):
    """An actor that knows its slot: its machine, and the devices there that are its own."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        """Called before PyTorch is imported, which reads the environment once. Threads that wait must not spin: on a
        machine that does something else too, spinning made small updates twenty times slower."""
        super().__init__(claim)
        found = ray.get_runtime_context().get_node_id()
        if found != slot.node:  # Ray moved the bundle after it was asked where it lies: the devices are others
            raise EngineError(f"this actor was to run on node {slot.node} and runs on {found}: it must be made again")
        if slot.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(slot.gpu_ids)
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        self._slot = slot

    def _process(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": self._slot.address, "slot": self._slot}


class _OnItsMachine(_Placed):
    """What actors of servers know of their machine."""

    def host(self) -> str:
        """Its address within the cluster."""
        return self._slot.address

    def free_port(self, host: str) -> int:
        """See `cairn.engines.rollout.sglang.server.free_port`."""
        from cairn.engines.rollout.sglang.server import free_port

        return free_port(host)


class _OfModels:
    """What actors of engines know of the models that they load."""

    def model_digests(self, folders: Mapping[str, str]) -> dict[str, str]:
        """Digests of model folders as this machine has them, by the names given to them."""
        from cairn.engines.models import folder_digest

        return {name: folder_digest(Path(folder)) for name, folder in folders.items()}


class RolloutActor(_OnItsMachine, _OfModels, WeightTarget):
    """A rollout engine in a process of its own, or one machine's part of it."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        super().__init__(claim, num_threads, slot)
        self._engine: RolloutEngine | None = None
        self._further_rank: FurtherRank | None = None
        self._samples = SampleEngine(lambda requests: self._started.generate(requests), lambda: self._started.abort())
        self._batch_invariant = False

    def start(
        self,
        model_path: str,
        config: RolloutConfig,
        plan: EnginePlan,
        place: Place,
        log: Path,
        start_timeout: float,
        call_timeout: float,
    ) -> None:
        """Make the engine; see `cairn.engines.rollout.factory`. Raises BadModel, EngineDied and EngineTimeout."""
        device = device_of(plan.num_gpus)
        if place.node_rank:
            from cairn.engines.rollout.sglang.launch import FurtherRank, launch

            launched = launch(model_path, config, device, plan, place, log, start_timeout)
            self._further_rank = FurtherRank(launched)
            return
        from cairn.engines.rollout.factory import make_engine

        engine = make_engine(model_path, config, device, plan, place, log, start_timeout, call_timeout)
        self._batch_invariant = engine.check_batch_invariance()
        self._engine = engine

    def health(self) -> dict[str, Any]:
        """What the engine says of itself, and its process. Answers at once, also while the engine works."""
        return {**(self._further_rank or self._started).health(), **self._process()}

    def environment(self) -> "Environment":
        """What the engine computes on."""
        return (self._further_rank or self._started).environment()

    def follow(self, route: Route | None) -> None:
        """See `SGLangEngine.follow`; other engines have no choice."""
        from cairn.engines.rollout.sglang.engine import SGLangEngine

        assert isinstance(self._started, SGLangEngine)
        self._started.follow(route)

    def batch_invariant(self) -> bool:
        """Whether samples do not depend on what else is in their batch, as tried when the engine started."""
        return self._batch_invariant

    def usage(self) -> dict[str, int]:
        return self._started.usage()

    def abort(self) -> None:
        """End what is being generated, and its stream."""
        self._samples.abort()
        self._started.abort()

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        yield from self._started.generate(requests)

    def generate_samples(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample]]:
        """See `cairn.engines.rollout.samples`."""
        yield from self._samples.generate(samples, params, function)

    @property
    def _started(self) -> "RolloutEngine":
        if self._engine is None:
            raise EngineError("the rollout engine has not been started")
        return self._engine


class RouterActor(_OnItsMachine):
    """The router before the rollout servers, in a process of its own."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        super().__init__(claim, num_threads, slot)
        self._router: Router | None = None

    def start(self, options: dict[str, Any], config: RolloutConfig, host: str, log: Path, start_timeout: float) -> None:
        """See `cairn.engines.rollout.sglang.router.Router`."""
        from cairn.engines.rollout.sglang.router import Router

        self._router = Router(
            options,
            host,
            log,
            start_timeout,
            config.rollout_health_check_interval,
            config.rollout_health_check_timeout,
        )

    def health(self) -> dict[str, Any]:
        """What the router says of itself, and its process."""
        return {**self._started.health(), **self._process()}

    def serve(self, workers: Sequence[Worker]) -> None:
        self._started.serve(workers)

    def remove(self, url: str) -> None:
        self._started.remove(url)

    @property
    def _started(self) -> "Router":
        if self._router is None:
            raise EngineError("the router has not been started")
        return self._router


class TrainingActor(_Placed, _OfModels, WeightSource):
    """One rank of the training engine in a process of its own."""

    def __init__(self, claim: Claim, num_threads: int, slot: Slot) -> None:
        super().__init__(claim, num_threads, slot)
        self._engine: TrainingEngine | None = None
        self._rank = 0

    def listen(self) -> tuple[str, int]:
        """On rank 0: open the store over which the ranks find each other. Returns its host and port."""
        from torch.distributed import TCPStore

        host = self._slot.address
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_steps: int,
        rank: int,
        store_address: tuple[str, int] | None,
    ) -> None:
        """Make the engine; with several ranks, once all have met at rank 0's store. Raises BadModel."""
        from cairn.engines.training.determinism import prepare_environment
        from cairn.engines.training.factory import make_engine

        device = device_of(training.num_gpus_per_rank)
        prepare_environment(training, device)
        self._rank = rank
        if store_address is not None:
            self._meet(store_address, training, device)
        self._engine = make_engine(
            model,
            training,
            algorithm,
            temperature=temperature,
            total_steps=total_steps,
            rank=rank,
            world_size=training.world_size,
            device=device,
        )

    def health(self) -> dict[str, Any]:
        """What the engine says of itself, and its process. Answers at once, also while the engine works."""
        return {**self._started.health(), **self._process()}

    def environment(self) -> "Environment":
        """What the engine computes on."""
        return self._started.environment()

    def position(self) -> Position:
        return self._started.position()

    def train(
        self, batch: TrainBatch, num_steps: int, expected_version: int, input_digest: str, train_actor: bool
    ) -> TrainResult:
        return self._started.train(
            batch,
            num_steps=num_steps,
            expected_version=expected_version,
            input_digest=input_digest,
            train_actor=train_actor,
        )

    def score(self, batch: TrainBatch, role: Role) -> "list[np.ndarray] | None":
        """The scores on rank 0, None elsewhere: all ranks have the same."""
        scores = self._started.score(batch, role)
        return scores if self._rank == 0 else None

    def save(self, store_url: str, folder: str) -> "list[StoredFile]":
        from cairn.storage.store import open_store

        return self._started.save(open_store(store_url), folder)

    def load(self, store_url: str, folder: str) -> None:
        from cairn.storage.store import open_store

        self._started.load(open_store(store_url), folder)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"]) -> str:
        return self._started.weights_checksum(dtype)

    def offload(self) -> None:
        self._sharing.offload()

    def onload(self) -> None:
        self._sharing.onload()

    def _meet(self, store_address: tuple[str, int], training: TrainingConfig, device: str) -> None:
        from torch import distributed

        timeout = timedelta(seconds=training.timeout)
        host, port = store_address
        store = self._store if self._rank == 0 else distributed.TCPStore(host, port, is_master=False, timeout=timeout)
        # On GPUs too: Megatron makes groups over gloo beside those over NCCL.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(self._slot.address))
        distributed.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            store=store,
            rank=self._rank,
            world_size=training.world_size,
            timeout=timeout,
        )

    @property
    def _started(self) -> "TrainingEngine":
        if self._engine is None:
            raise EngineError("the training engine has not been started")
        return self._engine


def _interface_of(ip: str) -> str:
    """Name of the network interface that has the address; gloo would look its host name up instead."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    raise EngineError(f"no network interface of this machine has the address {ip}, under which Ray knows it")
