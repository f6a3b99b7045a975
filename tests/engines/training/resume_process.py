"""A process that makes six updates in one go and three that it saves, or one that loads those and makes three more.

Prints the state digest after the last update, for one thread and for two."""

import sys
from pathlib import Path

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.storage.opening import open_store
from tests.engines.training.builders import make_batch, make_engine

UPDATES = 6


def engine_with(folder: Path, threads: int) -> TorchEngine:
    algorithm = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3")
    return make_engine(
        folder,
        algorithm=algorithm,
        num_threads=threads,
        max_tokens_per_gpu=200,
        lr_warmup_iters=2,
        lr_decay_style="cosine",
        total_steps=UPDATES,
    )


def update(engine: TorchEngine, first: int, last: int) -> str:
    for version in range(first, last):
        batch = make_batch(24, seed=version, old=True, ref=True)
        engine.train(batch, num_steps=1, expected_version=version, input_digest=str(version))
    return engine.state_digest()


def main(mode: str, model: Path, url: str) -> None:
    store = open_store(url)
    for threads in (1, 2):
        engine = engine_with(model, threads)
        if mode == "straight":
            print(update(engine, 0, UPDATES))
            engine = engine_with(model, threads)
            update(engine, 0, UPDATES // 2)
            engine.save(store, f"threads-{threads}")
        else:
            engine.load(store, f"threads-{threads}")
            print(update(engine, UPDATES // 2, UPDATES))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
