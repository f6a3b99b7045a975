"""The biases that balance the experts of a model: beside a router's scores they decide who is chosen, and they have no
part in the weights of those who are (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).

No gradient trains them, and the library holds them as buffers. A step may move them by the tokens that it has seen.
"""

from collections.abc import Iterator

import torch

_NAME = "e_score_correction_bias"


def biases_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a model of transformers, or of a part of it, with their names."""
    return ((name, value) for name, value in module.named_buffers() if name.rpartition(".")[2] == _NAME)


def rebalanced(bias: torch.Tensor, tokens: torch.Tensor, rate: float) -> torch.Tensor:
    """[experts]: the biases after a step. Those of experts that more tokens chose than the mean fall by the rate, of
    those that fewer chose rise (Megatron-core's `get_updated_expert_bias`).

    Args:
        tokens: [experts] that chose each, of all ranks.
    """
    counted = tokens.to(torch.float32)
    return bias + rate * torch.sign(counted.mean() - counted)
