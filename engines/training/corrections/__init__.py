"""Weights of tokens that other weights sampled, or another engine. One correction a file, `correct(tokens, config)`."""

from collections.abc import Mapping
from typing import Protocol

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens


class Correction(Protocol):
    """From log-probs to what the loss of each token is multiplied by."""

    def __call__(self, tokens: Tokens, config: AlgorithmConfig, /) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """[T] weights, through which no gradient flows; and metrics, also [T], whose means over the batch are recorded
        by their names. All ranks that hold parts of the same samples call it together, as they do a loss.

        Args:
            tokens: `old_log_probs` are the trainer's, `rollout_log_probs` the rollout engine's.
        """
