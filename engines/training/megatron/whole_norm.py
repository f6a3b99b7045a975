"""A norm of all query heads, or all key heads, together, where Megatron's own are of each head by itself."""

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class WholeNorm(torch.nn.Module):
    """Each tensor-parallel rank has the weight of its own heads; the sum of squares is that of all ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        """
        Args:
            hidden_size: of one head.
            heads: on all ranks.
        """
        super().__init__()
        self._width, self._eps = heads * hidden_size, eps
        local = self._width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))
        cut: Any = self.weight
        cut.tensor_model_parallel, cut.partition_dim, cut.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, batch, heads, head_dim] from the same, as far as this rank has the heads."""
        squares = x.float().square().sum((-2, -1), keepdim=True)
        # Every rank's output depends on the sum, so both it and its gradient are added up.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        return (x * torch.rsqrt(squares / self._width + self._eps)).type_as(x) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """As Megatron asks each module for what a checkpoint holds of it."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
        )
