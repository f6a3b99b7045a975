"""Checkpoints as earlier versions of Cairn wrote them, which every version reads."""

import hashlib
import pickle
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save as save_safetensors

from cairn.engines.training.checkpoint import (
    FORMAT,
    REFERENCE,
    STATE,
    CheckpointFile,
    TrainingState,
    write_sealed,
)
from cairn.engines.training.sharding import whole
from cairn.storage.store.store import Store


def save_torch(engine: Any, store: Store, folder: str) -> None:
    """Write the state of an engine `torch`, on its only rank."""
    kinds = {kind: {name: whole(t.detach()).clone() for name, t in named} for kind, named in engine._state().items()}
    write_state(store, folder, kinds.items(), weight_version=engine._version, state_digest=engine.state_digest())


def write_state(
    store: Store,
    folder: str,
    files: Iterable[tuple[str, dict[str, torch.Tensor]]],
    *,
    weight_version: int,
    state_digest: str,
) -> None:
    """Write the files of a state of the engine `torch`, and then its description."""
    written: list[CheckpointFile] = []
    for kind, tensors in files:
        data = save_safetensors(tensors)
        number = sum(file.kind == kind for file in written)
        file = CheckpointFile(
            name=f"{kind}-{number:05d}.safetensors",
            kind=kind,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            tensors=sorted(tensors),
        )
        store.write(f"{folder}/{file.name}", data)
        written.append(file)
    state = TrainingState(format=FORMAT, weight_version=weight_version, state_digest=state_digest, files=written)
    write_sealed(store, f"{folder}/{STATE}", state)


def save_megatron(engine: Any, store: Store, folder: str) -> None:
    """Write the state of an engine `megatron`, in the format of Megatron's dist_checkpointing; all ranks take part."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from cairn.engines.training.megatron import checkpoint

    def state_of(learner: Any) -> dict[str, Any]:
        state = checkpoint.sharded_weights(learner.chunks)
        frozen = learner.state.frozen
        moments = checkpoint.sharded_weights(learner.chunks, non_homogeneous_layers=True) if frozen else state
        for part in learner.optimizer.chained_optimizers:
            if isinstance(part, DistributedOptimizer):
                part.get_parameter_state_dp_zero = partial(
                    _whole_parameter_state, part, DistributedOptimizer.get_parameter_state_dp_zero
                )
        metadata = dict(checkpoint._METADATA)
        optimizer = learner.optimizer.sharded_state_dict(moments, is_loading=False, metadata=metadata)
        return {**state, "optimizer": optimizer}

    files: list[checkpoint.CheckpointFile] = []
    parts: Mapping[str, Any] = {role: state_of(learner) for role, learner in engine._learners.items()}
    if engine._reference is not None:
        parts = {**parts, REFERENCE: checkpoint.sharded_weights(engine._reference.chunks)}
    for role, state in parts.items():
        with TemporaryDirectory() as own:
            every: list[Any] = [own] * dist.get_world_size()
            dist.all_gather_object(every, own)
            local = Path(every[0])
            dist_checkpointing.save(state, str(local), TorchDistSaveShardedStrategy())
            if dist.get_rank() == 0:
                metadata = pickle.loads((local / ".metadata").read_bytes())
                metadata.storage_meta = None
                (local / ".metadata").write_bytes(pickle.dumps(metadata))
                for file in sorted(local.iterdir()):
                    name, data = file.name if role == "actor" else f"{role}/{file.name}", file.read_bytes()
                    store.write(f"{folder}/{name}", data)
                    files.append(
                        checkpoint.CheckpointFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
                    )
            dist.barrier()
    digest = engine.state_digest()
    if dist.get_rank() == 0:
        actor = engine._learners["actor"]
        described = checkpoint.MegatronState(
            format=checkpoint.FORMAT,
            weight_version=engine._version,
            state_digest=digest,
            use_distributed_optimizer=actor.optimizer.config.use_distributed_optimizer,
            files=files,
            frozen=tuple(sorted(actor.state.frozen)),
        )
        write_sealed(store, f"{folder}/{checkpoint.STATE}", described)
    dist.barrier()


def _whole_parameter_state(optimizer: Any, gather: Any, **options: Any) -> Any:
    """Return Megatron's gathered state on every rank. Its first rank alone would write it."""
    return gather(optimizer, use_gloo_comm=False, return_on_all_ranks=True)
