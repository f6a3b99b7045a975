"""A process that makes six updates in one go and four of which it saves three, and then kills itself, or one that loads
those and makes three more.

Prints the state digest after the last update, for one thread, for two, with the state on the host, and with packed
rows."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.storage.opening import open_store
from tests.engines.training.builders import make_batch, make_engine

UPDATES = 6


VARIANTS: tuple[dict[str, Any], ...] = (
    {"num_threads": 1},
    {"num_threads": 2},
    {"num_threads": 1, "fsdp_cpu_offload": True},
    {"num_threads": 2, "sequence_packing": True},
)


def engine_with(folder: Path, options: dict[str, Any]) -> TorchEngine:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
    return make_engine(
        folder,
        algorithm=algorithm,
        max_tokens_per_gpu=200,
        lr_warmup_iters=2,
        lr_decay_style="cosine",
        total_steps=UPDATES,
        **options,
    )


def update(engine: TorchEngine, first: int, last: int) -> str:
    for version in range(first, last):
        batch = make_batch(24, seed=version, old=True, ref=True)
        engine.train(batch, num_steps=1, expected_version=version, input_digest=str(version))
    return engine.state_digest()


def main(mode: str, model: Path, url: str) -> None:
    store = open_store(url)
    for number, options in enumerate(VARIANTS):
        engine, checkpoint = engine_with(model, options), str(number)
        if mode == "straight":
            print(update(engine, 0, UPDATES), flush=True)
            engine = engine_with(model, options)
            update(engine, 0, UPDATES // 2)
            engine.save(store, checkpoint)
            update(engine, UPDATES // 2, UPDATES // 2 + 1)
        else:
            engine.load(store, checkpoint)
            print(update(engine, UPDATES // 2, UPDATES))
    if mode == "straight":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
