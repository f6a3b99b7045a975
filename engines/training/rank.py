"""A rank of the training engine in its own process: how ranks find each other, and the calls they serve.

Nothing here loads PyTorch before the process is prepared for it. A rank passes on all other calls to its engine.
"""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import psutil

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.libraries import prepare_trainer
from cairn.engines.training.weight_source import WeightSource
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import ModelRole, TrainBatch
from cairn.storage.opening import open_store
from cairn.storage.store.store import StoredFile

if TYPE_CHECKING:
    import numpy as np

    from cairn.engines.training.base import TrainingEngine
    from cairn.engines.weights.versions import VersionWriter


class TrainingRank(WeightSource):
    """A training rank at an address of its machine, without an engine until `start`."""

    def __init__(self, address: str, training: TrainingConfig) -> None:
        prepare_trainer(training)
        super().__init__()
        self._address = address
        self._training = training
        self._engine: TrainingEngine | None = None
        self._rank = 0
        self._versions: VersionWriter | None = None

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of `cairn.engines.training.base.TrainingEngine`."""
        return getattr(self._started, name)

    def listen(self) -> tuple[str, int]:
        """On rank 0: open the store over which the ranks find each other. Return its host and port."""
        from torch.distributed import TCPStore

        self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return self._address, self._store.port

    def start(
        self,
        model: ModelConfig,
        algorithm: AlgorithmConfig,
        temperature: float,
        total_steps: int,
        rank: int,
        store_address: tuple[str, int] | None,
        served_folder: str | None = None,
        load_code: Callable[[], None] | None = None,
    ) -> None:
        """Create the engine; with several ranks, once all have met at rank 0's store. Raises BadModel, and what
        `load_code` raises.

        Args:
            served_folder: model folder in whose format rollout engines hold weights and receive them; None for plain
                weights.
            load_code: loads the user code that the engine runs.
        """
        from cairn.engines.processes.numa import bind_beside_gpu
        from cairn.engines.training.factory import make_engine

        bind_beside_gpu()
        if load_code is not None:
            load_code()
        training = self._training
        device = "cuda" if training.num_gpus_per_rank > 0 else "cpu"
        self._rank = rank
        if served_folder is not None:
            from cairn.engines.weights.fp8 import Fp8Weights

            self._fp8 = Fp8Weights.of(served_folder)
        if store_address is not None:
            self._meet(store_address, device)
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
        # A full collection walks through all modules and the model, for a quarter of a second or more, at any time.
        gc.collect()
        gc.freeze()

    def score(self, batch: TrainBatch, role: ModelRole) -> "list[np.ndarray] | None":
        """Return the scores on rank 0 and None elsewhere; all ranks have the same."""
        scores = self._started.score(batch, role)
        return scores if self._rank == 0 else None

    def write_copy(self, store_url: str, folder: str) -> list[StoredFile]:
        return self._started.write_copy(open_store(store_url), folder)

    def describe_copy(self, store_url: str, folder: str, indexes: list[StoredFile]) -> StoredFile:
        return self._started.describe_copy(open_store(store_url), folder, indexes)

    def load(self, store_url: str, folder: str) -> None:
        self._started.load(open_store(store_url), folder)

    def copy_version(self, version: int, dtype: Literal["float32", "bfloat16"], digest: str, base: str | None) -> int:
        """On all ranks: copy the weights of `version` to the host, each rank some of them
        (`cairn.engines.weights.versions.VersionWriter`). Return the bytes that this rank has copied.

        `base`: checksum of the version to which the difference is to be written. Where one of the ranks has not kept
        that, all write whole weights. Raises WrongVersion if the engine is at another version.
        """
        import torch

        from cairn.engines.training.process import gathered
        from cairn.engines.training.sharding import raising_together
        from cairn.engines.weights.versions import FILE_BYTES, VersionWriter

        self._require_version(version)
        self._versions = self._versions or VersionWriter(self._rank)
        ranks = self._training.world_size
        keep = gathered(self._versions.keeps(base), ranks)
        device = torch.device("cuda" if self._training.num_gpus_per_rank > 0 else "cpu")
        with raising_together(ranks, device):
            buckets = self._started.export_weights(FILE_BYTES, in_turn=True)
            return self._versions.copy(buckets, getattr(torch, dtype), digest, base if all(keep) else None)

    def write_version(self, store_url: str, folder: str) -> list[StoredFile]:
        """Write the copied weights of this rank below `folder`, while the engine may train. Return the files. Raises
        StoreError if the store refused a file, or did not respond."""
        if self._versions is None:
            raise EngineError("no weights are copied")
        return self._versions.write(open_store(store_url), folder)

    def offload(self) -> None:
        self._sharing.offload()

    def onload(self) -> None:
        self._sharing.onload()

    def _meet(self, store_address: tuple[str, int], device: str) -> None:
        from torch import distributed

        timeout = timedelta(minutes=self._training.distributed_timeout_minutes)
        host, port = store_address
        store = self._store if self._rank == 0 else distributed.TCPStore(host, port, is_master=False, timeout=timeout)
        # On GPUs too: Megatron creates groups over gloo as well as over NCCL.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface_of(self._address))
        # Shards on the host are summed and gathered there, over gloo.
        on_gpu = "cpu:gloo,cuda:nccl" if self._training.fsdp_cpu_offload else "nccl"
        distributed.init_process_group(
            "gloo" if device == "cpu" else on_gpu,
            store=store,
            rank=self._rank,
            world_size=self._training.world_size,
            timeout=timeout,
        )

    @property
    def _started(self) -> "TrainingEngine":
        if self._engine is None:
            raise EngineError("the training engine has not been started")
        return self._engine


def _interface_of(ip: str) -> str:
    """Return the name of the network interface with this address; gloo would look up its host name instead."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == ip for address in addresses):
            return name
    raise EngineError(f"no network interface of this machine has the address {ip}, which Ray uses for it")
