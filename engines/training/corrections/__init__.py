"""Weights for tokens that were sampled with other model weights or by another engine.

Each file holds one correction, `correct(tokens, config)`.
"""

from collections.abc import Mapping
from typing import Protocol

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens


class Correction(Protocol):
    """Function from log-probs to the weight that multiplies each token's loss."""

    def __call__(self, tokens: Tokens, config: AlgorithmConfig, /) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return [T] weights, through which no gradient flows, and metrics.

        Metrics are also [T]; their means over the batch are recorded by their names. All ranks that hold parts of the
        same samples call the function together, like a loss.

        Args:
            tokens: `old_log_probs` are the trainer's, `rollout_log_probs` the rollout engine's.
        """
