"""Checkpoints of four ranks over gloo: how long training waits, how long all takes, and what a restore reads.

    python -m bench.checkpoint [--engine megatron] [--hidden 512] [--layers 8] [--repeats 3] [--smoke] [--json FILE]

Nothing is trained: the ranks write the state of a new Qwen3 model (float32, with moments) into a folder of
this machine several times, copy it as often, and read one of the checkpoints. Seconds end when the last rank has ended.
Training waits until the copy is begun; the next change of the state waits until it is made. The ratio of the first of
these to the whole checkpoint is the part for which training waits.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from bench.command import parse, say
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.storage.opening import open_store
from cairn.storage.store.store import Store

RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "torch": {},
    "megatron": {"use_distributed_optimizer": True},
    "megatron, TP 2": {"use_distributed_optimizer": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
}


class Counting:
    """A store that counts what is read of it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.bytes = self.requests = 0

    def read(self, path: str) -> bytes:
        return self._count(self._store.read(path))

    def read_range(self, path: str, start: int, end: int) -> bytes:
        return self._count(self._store.read_range(path, start, end))

    def get_file(self, path: str, local: Path) -> None:
        self._store.get_file(path, local)
        self._count(local.read_bytes())

    def _count(self, data: bytes) -> bytes:
        self.bytes += len(data)
        self.requests += 1
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def model_folder(folder: Path, hidden: int, layers: int) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=hidden // 8,
        vocab_size=8192,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def rank_main(rank: int, args: argparse.Namespace, work: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=RANKS)
    from cairn.engines.training.factory import make_engine

    engine = make_engine(
        ModelConfig(path=str(work / "model")),
        TrainingConfig.model_validate(
            {"engine": args.engine.partition(",")[0], "world_size": RANKS, "megatron": LAYOUTS[args.engine]}
        ),
        AlgorithmConfig(),
        temperature=1.0,
        total_steps=10,
        rank=rank,
        world_size=RANKS,
    )
    store: Any = Counting(open_store(str(work / "store")))
    engine.position()  # computes the digest, which every update does too
    gc.collect()
    gc.freeze()  # as a rank does when it has started
    whole, waits, copies = [], [], []
    for number in range(args.repeats):
        dist.barrier()
        began = time.perf_counter()
        engine.save(store, f"whole-{number}")
        dist.barrier()
        whole.append(time.perf_counter() - began)
        began = time.perf_counter()
        engine.copy_state()
        dist.barrier()
        waits.append(time.perf_counter() - began)
        engine.drop_copy()  # when it is made
        dist.barrier()
        copies.append(time.perf_counter() - began)
    began = time.perf_counter()
    engine.load(store, "whole-0")
    dist.barrier()
    loaded = time.perf_counter() - began
    read: list[Any] = [None] * RANKS
    dist.all_gather_object(read, (store.bytes, store.requests))
    if rank == 0:
        size = sum(store.find("whole-0").values())
        report = {
            "state_mb": round(size / 1e6, 1),
            "save_s": [round(each, 3) for each in whole],
            "blocking_s": [round(each, 3) for each in waits],
            "copied_s": [round(each, 3) for each in copies],
            "blocking_share": round(statistics.median(waits) / statistics.median(whole), 3),
            "load_s": round(loaded, 2),
            "read_over_state": round(sum(bytes_ for bytes_, _ in read) / size, 3),
            "requests": sum(requests for _, requests in read),
            "files": len(store.find("whole-0")),
        }
        (work / "report.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def main() -> None:
    """Measure one engine or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--engine", choices=LAYOUTS, help="one engine and layout; by default all")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    args = parse(parser, engine="megatron", hidden=64, layers=2, repeats=1)
    results = {}
    for engine in [args.engine] if args.engine else LAYOUTS:
        args.engine = engine
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            model_folder(work / "model", args.hidden, args.layers)
            torch.multiprocessing.start_processes(rank_main, (args, work), nprocs=RANKS, start_method="spawn")
            results[engine] = json.loads((work / "report.json").read_text())
        say(f"{engine}: {json.dumps(results[engine])}")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
