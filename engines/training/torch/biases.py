"""The biases that balance the experts of a model that is trained: what they are moved by (`cairn.engines.biases`)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from cairn.engines.biases import biases_of, rebalanced
from cairn.engines.routing import chosen_experts, mixtures


class Balance:
    """Counts the tokens of each expert over an optimizer step, and moves the biases by them."""

    def __init__(self, model: torch.nn.Module, rate: float) -> None:
        self._rate = rate
        self._real: torch.Tensor | None = None
        self._model = model
        self._counts: list[torch.Tensor] = []
        for block in mixtures(model).values():
            for _, bias in biases_of(block):
                see = partial(self._see, len(self._counts))
                block.experts.register_forward_pre_hook(see, with_kwargs=True)
                self._counts.append(torch.zeros_like(bias, dtype=torch.int64))

    @contextmanager
    def counting(self, real: torch.Tensor | None) -> Iterator[None]:
        """Of a first pass. `real`: [T] bool, which of its tokens count; None: none do."""
        self._real = real
        try:
            yield
        finally:
            self._real = None

    def forget(self) -> None:
        """Begin to count."""
        self._counts = [torch.zeros_like(count) for count in self._counts]

    @torch.no_grad()
    def update(self, world_size: int) -> None:
        """Move the biases by what all ranks have counted."""
        # Asked for anew: buffers that went to the host and back are other objects than before.
        for (_, bias), count in zip(biases_of(self._model), self._counts, strict=True):
            if world_size > 1:
                dist.all_reduce(count)
            bias.copy_(rebalanced(bias, count, self._rate))

    def _see(self, layer: int, experts: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._real is not None:
            chosen = chosen_experts(args, kwargs)[self._real].flatten()
            self._counts[layer] += torch.bincount(chosen, minlength=len(self._counts[layer]))
