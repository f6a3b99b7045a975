"""Batches of responses with ragged masks, some empty, and log-probs that are far apart, for hypothesis to draw."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.aggregations import token_weights
from cairn.engines.training.collate import Tokens, collate_trained
from cairn.engines.types.types import TrainBatch

CPU = torch.device("cpu")
Response = list[tuple[bool, float, float]]
"""Of each token, whether it is trained on and its log-probs by the trainer and by the rollout engine."""

# Quarters, whose sums float32 holds exactly, so that no ratio falls on the other side of a bound.
log_probs = st.integers(-40, 0).map(lambda n: n / 4) | st.sampled_from([-1e5, -100.0])
responses = st.lists(st.lists(st.tuples(st.booleans(), log_probs, log_probs), max_size=4), min_size=1, max_size=4)


def batch_of(samples: Sequence[Response]) -> TrainBatch:
    def column(index: int, kind: Any = np.float32) -> list[np.ndarray]:
        return [np.array([token[index] for token in sample], kind) for sample in samples]

    return TrainBatch(
        input_ids=[np.arange(2 + len(sample), dtype=np.int32) for sample in samples],
        response_lengths=[len(sample) for sample in samples],
        loss_mask=column(0, np.uint8),
        advantages=[np.ones(len(sample), np.float32) for sample in samples],
        old_log_probs=column(1),
        rollout_log_probs=column(2),
    )


def tokens_of(batch: TrainBatch, algorithm: AlgorithmConfig) -> Tokens:
    weights = token_weights([int(mask.sum()) for mask in batch.loss_mask], algorithm)
    return collate_trained(batch, range(len(batch)), weights, CPU)
