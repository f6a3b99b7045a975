"""The experts of the rollout in the place of the choice of Megatron's routers.

A router asks its `router_replay` for the best of its scores, where it has one; Megatron's own is one list of all layers
for the whole process. Here each router has the experts of the micro-batch that goes through it, and where layers are
computed again for the backward pass, those of the micro-batches that it has yet to see again: a chunk of layers sees
them in the order in which it saw them first, in every schedule.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter

from cairn.engines.routing import RouterChoice, differing, with_replayed
from cairn.engines.training.megatron.packing import own_tokens


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
            routed: [T, layers, top-k] of this context-parallel rank's tokens, `cairn.engines.routing.FREE` where
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
