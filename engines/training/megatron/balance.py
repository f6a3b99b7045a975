"""The biases that balance the experts of a model that is trained: what they are moved by (`cairn.engines.biases`).

Megatron's own update comes while gradients are summed, before it is known that they are finite, and counts padding.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from cairn.engines.biases import rebalanced
from cairn.engines.training.megatron.packing import own_tokens


class Balance:
    """Counts the tokens of each expert over an optimizer step, and moves the biases by them."""

    def __init__(self, config: Any, chunks: Sequence[Any], rate: float) -> None:
        """
        Args:
            chunks: of the model, as they are called.
        """
        self._rate, self._cut = rate, config.sequence_parallel
        modules = (module for chunk in chunks for module in chunk.modules())
        self._routers: list[Any] = [one for one in modules if isinstance(one, TopKRouter) and one.enable_expert_bias]
        self._counts = [torch.zeros_like(router.expert_bias, dtype=torch.int64) for router in self._routers]
        self._real: torch.Tensor | None = None
        for layer, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._see, layer))

    @contextmanager
    def counting(self, real: torch.Tensor) -> Iterator[None]:
        """A micro-batch goes through a chunk for the first time. `real`: [T] bool, which of this context-parallel
        rank's tokens count."""
        self._real = own_tokens(real, self._cut)
        yield
        self._real = None

    def forget(self) -> None:
        """Begin to count."""
        for count in self._counts:
            count.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Move the biases by what all ranks have counted that hold these layers."""
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        for router, count in zip(self._routers, self._counts, strict=True):
            dist.all_reduce(count, group=group)
            router.expert_bias.copy_(rebalanced(router.expert_bias, count, self._rate))

    def _see(self, layer: int, router: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self._real is not None:
            self._counts[layer] += output[1][self._real].sum(0)
