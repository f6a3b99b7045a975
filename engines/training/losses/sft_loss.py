"""Supervised fine-tuning: the negative log-likelihood of the trained tokens, l_t = -log π(y_t)."""

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens
from cairn.engines.training.protocol import TokenLosses


def loss(log_probs: torch.Tensor, tokens: Tokens, config: AlgorithmConfig) -> TokenLosses:
    """Return [T] losses in nats."""
    return -log_probs, {}
