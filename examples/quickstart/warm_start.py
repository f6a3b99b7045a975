"""Supervised training of the tiny model on the demonstrations, through the engine that later trains it with rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.types import TrainBatch

Example = tuple[Sequence[int], Sequence[int]]
"""Token ids of a prompt and of the response to it."""

BATCH = 64
STEPS_PER_CALL = 10

TRAINING = TrainingConfig(
    lr=5e-3,
    lr_decay_style="cosine",
    lr_warmup_iters=10,
    adam_beta2=0.95,
    clip_grad=1.0,
    weight_decay=0.0,
    num_threads=1,
)
ALGORITHM = AlgorithmConfig(loss_type="sft_loss", calculate_per_token_loss=True)


def warm_start(
    untrained: Path, trained: Path, examples: Sequence[Example], progress: Callable[[int, float], None]
) -> None:
    """Train the model in folder `untrained` on the examples, in order and each once, and write folder `trained`.

    Their number is a multiple of `BATCH` × `STEPS_PER_CALL`. `progress` is told the number of steps done and the loss.
    """
    steps = len(examples) // BATCH
    engine = TorchEngine(ModelConfig(path=str(untrained)), TRAINING, ALGORITHM, temperature=1.0, total_steps=steps)
    for step in range(0, steps, STEPS_PER_CALL):
        batch = _batch(examples[step * BATCH : (step + STEPS_PER_CALL) * BATCH])
        result = engine.train(
            batch, num_steps=STEPS_PER_CALL, expected_version=step, input_digest=f"demonstrations of step {step}"
        )
        progress(result.weight_version, result.metrics["loss"])
    engine.export_hf(trained)


def _batch(examples: Sequence[Example]) -> TrainBatch:
    return TrainBatch(
        input_ids=[np.array([*prompt, *response], np.int32) for prompt, response in examples],
        response_lengths=[len(response) for _, response in examples],
        loss_mask=[np.ones(len(response), np.uint8) for _, response in examples],
    )
