"""Replay of the rollout's experts in Megatron's routers, in place of their own choice.

A router that has a `router_replay` calls it for the best of its scores. Megatron's own replay is one list of all layers
for the whole process. Here each router uses the experts of the micro-batch that passes through it. Where layers are
recomputed for the backward pass, it uses those of the micro-batches that are not recomputed yet. In every schedule, a
chunk of layers recomputes micro-batches in the order of their first passes.
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


class Balance:
    """Load-balancing biases of a trained model's experts (`cairn.engines.models.published`).

    Counts the tokens of each expert over an optimizer step, and updates the biases from the counts. Megatron's own
    update runs while gradients are summed, before it is known whether they are finite, and it counts padding.
    """

    def __init__(self, config: Any, chunks: Sequence[Any], rate: float) -> None:
        """
        Args:
            chunks: the model's chunks, as callable modules.
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
        """Count tokens within the context, in which a micro-batch passes through a chunk for the first time.

        Args:
            real: [T] bool, which of this context-parallel rank's tokens count.
        """
        self._real = own_tokens(real, self._cut)
        yield
        self._real = None

    def forget(self) -> None:
        """Reset the counts."""
        for count in self._counts:
            count.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Update the biases from the counts of all ranks that hold these layers."""
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        for router, count in zip(self._routers, self._counts, strict=True):
            dist.all_reduce(count, group=group)
            router.expert_bias.copy_(rebalanced(router.expert_bias, count, self._rate))

    def _see(self, layer: int, router: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        if self._real is not None:
            self._counts[layer] += output[1][self._real].sum(0)


def own_tokens(values: torch.Tensor, cut: bool) -> torch.Tensor:
    """Return the values of the tokens that a router of this tensor-parallel rank sees.

    Args:
        values: [T, …] of this context-parallel rank's tokens.
        cut: whether tensor-parallel ranks share a sequence between layers.
    """
    if not cut:
        return values
    ranks, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    return values.chunk(ranks)[rank]


class ReplayedExperts:
    """Experts to replay in one router."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        """Index among the whole model's layers with experts."""
        self.forward = False
        """Whether a micro-batch passes through for the first time."""
        self.experts: torch.Tensor | None = None
        """[T, top-k] experts of that micro-batch's tokens on this rank."""
        self.to_recompute: deque[torch.Tensor | None] = deque()
        """Experts of micro-batches that may be recomputed."""
        self.differing: torch.Tensor | float = 0.0
        """Number of replayed experts that the router would not have chosen."""

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., RouterChoice] | None = None,
    ) -> RouterChoice:
        """Return values and indices [T, top-k] of `scores` [T, experts], as Megatron's router requires them."""
        assert default_compute_topk is not None
        own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        experts = self.experts if self.forward else self.to_recompute.popleft()
        if experts is None:
            return own
        if self.forward:
            self.differing = self.differing + differing(own[1], experts)
        return with_replayed(own, experts, scores)


class Replay:
    """Replay of the rollout's experts in the routers of this rank's chunks."""

    def __init__(self, config: Any, chunks: Sequence[Any], has_experts: Callable[[Any, int], bool]) -> None:
        """
        Args:
            chunks: the model's chunks, as callable modules.
            has_experts: whether a layer, counted from 0, has experts.
        """
        places = [layer for layer in range(config.num_layers) if has_experts(config, layer)]
        self._recomputes = config.recompute_granularity is not None
        self._cut = config.sequence_parallel
        self._by_chunk: dict[int, list[ReplayedExperts]] = {}
        for chunk in chunks:
            routers = [module for module in chunk.modules() if isinstance(module, TopKRouter)]
            self._by_chunk[id(chunk)] = [ReplayedExperts(places.index(router.layer_number - 1)) for router in routers]
            for router, replayed in zip(routers, self._by_chunk[id(chunk)], strict=True):
                router.router_replay = replayed

    @contextmanager
    def forward(self, chunk: Any, routed: torch.Tensor | None) -> Iterator[None]:
        """Replay experts within the context, in which a micro-batch passes through a chunk.

        Args:
            routed: [T, layers, top-k] of this context-parallel rank's tokens, `cairn.engines.models.routing.FREE` where
                the router chooses; None: it always chooses.
        """
        for router in self._by_chunk[id(chunk)]:
            router.forward = True
            router.experts = None if routed is None else own_tokens(routed[:, router.layer], self._cut)
            if self._recomputes and torch.is_grad_enabled():
                router.to_recompute.append(router.experts)
        yield
        for router in self._by_chunk[id(chunk)]:
            router.forward, router.experts = False, None

    def differing(self) -> float:
        """Return the number of experts replayed since the last call that this rank's routers would not have chosen.

        Resets that number and drops the experts stored for recomputation, so no micro-batch may be in flight.
        """
        routers = [router for of_chunk in self._by_chunk.values() for router in of_chunk]
        total = float(sum(router.differing for router in routers))
        for router in routers:
            router.to_recompute.clear()
            router.differing = 0.0
        return total
