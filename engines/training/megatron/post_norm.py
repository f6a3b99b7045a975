"""Norms after a layer's attention and feed-forward part, which Megatron's own layers do not have."""

from collections.abc import Callable
from typing import Any

import torch


class PostNorm(torch.nn.Module):
    """Stands where Megatron adds a part's output to the residual stream, and normalises the output first."""

    def __init__(self, config: Any, norm: type[torch.nn.Module]) -> None:
        """`norm`: the backend's."""
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Megatron asks for the function that adds; there is neither bias nor dropout."""

        def add(output_and_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _: float) -> torch.Tensor:
            return residual + self.norm(output_and_bias[0])

        return add
