"""The experts of the rollout in the place of the choice of Megatron's routers.

A router asks its `router_replay` for the best of its scores, where it has one; Megatron's own is one list of all layers
for the whole process. Here each router has the experts of the micro-batch that goes through it, and where layers are
computed again for the backward pass, those of the micro-batches that it has yet to see again: a chunk of layers sees
them in the order in which it saw them first, in every schedule.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from cairn.engines.models.published import rebalanced
from cairn.engines.models.routing import RouterChoice, differing, with_replayed
from cairn.engines.training.megatron.packing import own_tokens

# The biases that balance the experts of a model that is trained: what they are moved by
# (`cairn.engines.models.published`).
#
# Megatron's own update comes while gradients are summed, before it is known that they are finite, and counts padding.


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


class GivenExperts:
    """Those of one router."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """Among those with experts, of the whole model."""
        self.forward = False
        """Whether a micro-batch goes through for the first time."""
        self.given: torch.Tensor | None = None
        """[T, top-k] of its tokens on this rank, then."""
        self.again: deque[torch.Tensor | None] = deque()
        """Of micro-batches that may come again."""
        self.differing: torch.Tensor | float = 0.0
        """How many experts were given that the router would not have chosen."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., RouterChoice] | None = None,
    ) -> RouterChoice:
        """Values and indices [T, top-k] of `scores` [T, experts], as Megatron's router asks for them."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = self.given if self.forward else self.again.popleft()
        if given is None:
            return own
        if self.forward:
            self.differing = self.differing + differing(own[1], given)
        return with_replayed(own, given, scores)


class Replay:
    """Gives the routers of this rank's chunks what the rollout chose."""

    def __init__(self, config: Any, chunks: Sequence[Any], has_experts: Callable[[Any, int], bool]) -> None:
        """
        Args:
            chunks: of the model, as they are called.
            has_experts: whether a layer, from 0, has experts.
        """
        places = [layer for layer in range(config.num_layers) if has_experts(config, layer)]
        self._again = config.recompute_granularity is not None
        self._cut = config.sequence_parallel
        self._given: dict[int, list[GivenExperts]] = {}
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._given[id(chunk)] = [GivenExperts(places.index(router.layer_number - 1)) for router in routers]
            for router, given in zip(routers, self._given[id(chunk)], strict=True):
                router.router_replay = given

    @contextmanager
    def forward(self, chunk: Any, routed: torch.Tensor | None) -> Iterator[None]:
        """A micro-batch goes through a chunk.

        Args:
            routed: [T, layers, top-k] of this context-parallel rank's tokens, `cairn.engines.models.routing.FREE` where
                nothing is given; None: nothing is.
        """
        for given in self._given[id(chunk)]:
            given.forward = True
            given.given = None if routed is None else own_tokens(routed[:, given.layer], self._cut)
            if self._again and torch.is_grad_enabled():
                given.again.append(given.given)
        yield
        for given in self._given[id(chunk)]:
            given.forward, given.given = False, None

    def differing(self) -> float:
        """How many experts were given to this rank's routers, since this was asked last, that they would not have
        chosen. No micro-batch is under way."""
        found = [given for routers in self._given.values() for given in routers]
        total = float(sum(given.differing for given in found))
        for given in found:
            given.again.clear()
            given.differing = 0.0
        return total
