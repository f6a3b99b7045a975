"""Supervised fine-tuning."""

import torch


def sft_loss(log_probs: torch.Tensor) -> torch.Tensor:
    """[T] negative log-likelihood of each token, in nats."""
    return -log_probs
