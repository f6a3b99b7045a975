"""A version of the weights on its way from four training ranks to several receivers, counted."""

import pickle
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import GroupName, PrefixStore, _new_process_group_helper, _world

from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.training.megatron.cases import ALGORITHM, TRAINING
from tests.engines.training.ranks import fork_ranks

RANKS = 4
RECEIVERS = (1, 2, 4)
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP 2, PP 2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "TP 2, DP 2, EP 4": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    },
    "PP 2, EP 2": {
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}
BUCKET = 60_000
COLLECTIVES = ("all_gather_into_tensor", "gather", "broadcast", "all_gather", "send", "recv", "all_reduce")
TIMEOUT = timedelta(seconds=120)


def launched(folder: Path, work: Path, layout: str) -> None:
    """Run the ranks and, in processes of their own, the receivers; leave reports."""
    ports = work / f"{layout}.port"
    fork_ranks(take_part, folder, work, layout, ports, world_size=RANKS + max(RECEIVERS))


def take_part(rank: int, folder: Path, work: Path, layout: str, ports: Path) -> None:
    store = dist.FileStore(str(ports), RANKS + max(RECEIVERS))
    store.set_timeout(TIMEOUT)
    if rank < RANKS:
        report: Any = train(rank, folder, layout, work, store)
    else:
        report = [receive(rank - RANKS, count, store) for count in RECEIVERS if rank - RANKS < count]
    (work / f"{layout}.{rank}.pickle").write_bytes(pickle.dumps(report))
    store.add("ended", 1)
    store.wait(["all ended"]) if store.add("ended", 0) < RANKS + max(RECEIVERS) else store.set("all ended", "")


class Counting:
    """Counts what this rank gives to PyTorch's collective operations."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> "Counting":
        self._own = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, call in self._own.items():
            setattr(dist, name, self._counted(name, call))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, call in self._own.items():
            setattr(dist, name, call)

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            given = args[1] if name == "all_gather_into_tensor" else args[0]
            self.counts["collectives"] += 1
            self.counts["bytes"] += given.nbytes
            return call(*args, **kwargs)

        return counted


def train(rank: int, folder: Path, layout: str, work: Path, store: dist.Store) -> dict[str, Any]:
    """Send the weights to 1, 2 and 4 receivers: broadcast by rank 0, and mapped from every rank's memory."""
    from cairn.engines.training.rank import TrainingRank

    dist.init_process_group("gloo", store=PrefixStore("ranks", store), rank=rank, world_size=RANKS)
    training = TrainingConfig(engine="megatron", world_size=RANKS, megatron=LAYOUTS[layout], **TRAINING)
    source = TrainingRank("127.0.0.1", training)
    source.start(ModelConfig(path=str(folder)), ALGORITHM, 1.0, 100, rank, None)
    report: dict[str, Any] = {"checksum": source.checksum_at(0, "float32"), "broadcast": [], "mapped": []}
    for count in RECEIVERS:
        with Counting() as counting:
            source.begin_export(0, BUCKET)
            if rank == 0:
                host, port = source.open_group(f"weights-{count}", 120.0)
                for receiver in range(count):
                    store.set(f"meeting {count} {receiver}", pickle.dumps((host, port)))
                source.join_group(1 + count, "gloo")
                buckets = 0
                while layout_of := source.stage_bucket("gloo"):
                    staged = source._staged.get_nowait()
                    counting.counts["sent"] += staged.nbytes
                    source._staged.put(staged)
                    store.set(f"layout {count} {buckets}", pickle.dumps(layout_of))
                    source.broadcast_bucket()
                    buckets += 1
                store.set(f"layout {count} {buckets}", pickle.dumps(None))
            source.end_export()
        report["broadcast"].append(dict(counting.counts))
        source.leave_group()
    for _ in RECEIVERS:
        with Counting() as counting:
            source.begin_export_on_device(0, BUCKET)
            weights: dict[str, torch.Tensor] = {}
            while source.share_bucket() is not None:
                counting.counts["sent"] += sum(tensor.nbytes for tensor in source._shared[-1].values())
                weights |= {name: tensor.clone() for name, tensor in source._shared[-1].items()}
            source.end_export()
        report["mapped"].append(dict(counting.counts))
    report["held"] = weights_checksum(weights.items())
    return report


def receive(receiver: int, count: int, store: dist.Store) -> str:
    """Return the checksum of what arrived in one broadcast group with `count` receivers."""
    host, port = pickle.loads(store.get(f"meeting {count} {receiver}"))
    with closing(Member(host, port, f"weights-{count}", 1 + count, 1 + receiver)) as member:
        weights: dict[str, torch.Tensor] = {}
        buckets = 0
        while entries := pickle.loads(store.get(f"layout {count} {buckets}")):
            bucket = Bucket.empty([(name, getattr(torch, dtype), shape) for name, dtype, shape in entries], CPU)
            assert bucket.storage is not None
            member.receive(bucket.storage)
            weights |= bucket
            buckets += 1
    return weights_checksum(weights.items())


CPU = torch.device("cpu")


class Member:
    """A member of the group that receives broadcasts, as a server's process is one."""

    def __init__(self, host: str, port: int, name: str, size: int, rank: int) -> None:
        store = PrefixStore(name, dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT))
        backend = dist.Backend("gloo")
        self._group, _ = _new_process_group_helper(
            size, rank, [], backend, store, group_name=GroupName(name), timeout=TIMEOUT
        )
        _world.pg_group_ranks[self._group] = {place: place for place in range(size)}

    def receive(self, target: torch.Tensor) -> None:
        self._group.broadcast([target], dist.BroadcastOptions()).wait()

    def close(self) -> None:
        dist.destroy_process_group(self._group)
