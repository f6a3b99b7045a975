"""Recording and replaying of the experts that routers of transformers models choose (rollout routing replay, arXiv
2510.11370, section 4).

A mixture of experts is a module with `experts`. It passes them the indices and weights that its router chose. The
router takes both from the `topk` of its scores for all experts, whether these come from a softmax, a sigmoid with a
correction bias, or groups. Replay changes the result of this one call: it returns the recorded experts with their
current scores. So the router computes the weights by its own formula and its own parameters, and gradients flow through
them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import PretrainedConfig, PreTrainedModel

from cairn.engines.models.folders import check_model_folder, model_class
from cairn.engines.models.published import biases_of
from cairn.engines.types.errors import BadModel, EngineError

FREE = -1
"""Index in place of each expert of a token without a recorded choice: the router chooses."""

RouterChoice = tuple[torch.Tensor, torch.Tensor]


def mixtures(model: torch.nn.Module) -> dict[str, Any]:
    """Return the mixtures of experts of a transformers model by their names, in the order of its layers."""
    return {name: module for name, module in model.named_modules() if _num_experts(module) is not None}


@dataclass(frozen=True)
class ExpertLayers:
    """Layers of a model that are mixtures of experts."""

    places: tuple[int, ...]
    """Layer numbers, from 0. Empty where the model has no such module that is known."""
    num_experts: int
    """Experts of each layer."""

    @classmethod
    def of(cls, config: PretrainedConfig) -> "ExpertLayers":
        """Return the expert layers that a model's config.json describes, without allocating weights."""
        blocks = mixtures(_without_memory(config))
        places = (int(next(part for part in name.split(".") if part.isdigit())) for name in blocks)
        return cls(tuple(places), max((_num_experts(block) or 0 for block in blocks.values()), default=0))


def replay_problems(path: str, megatron: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences that explain why the choice of experts of a folder's model cannot be recorded and replayed.

    Args:
        megatron: Megatron's options, where Megatron trains.
    """
    if megatron.get("moe_router_fusion"):
        yield (
            "algorithm.use_rollout_routing_replay is true, but training.megatron.moe_router_fusion chooses experts in "
            "a kernel, where the rollout's choice cannot replace it: leave one of them out"
        )
    try:
        config = check_model_folder(path)
        known = ExpertLayers.of(config)
    except BadModel:  # reported where folders are checked
        return
    if not known.places:
        yield (
            f"algorithm.use_rollout_routing_replay is true, and the model in {path} ({config.model_type}) has no "
            "mixture of experts, or none that reports its choice: leave it out"
        )


def bias_problems(path: str, rate: float) -> Iterator[str]:
    """Yield sentences that explain why the model has no router bias that a step could move by `rate`."""
    try:
        config = check_model_folder(path)
        bias = next(biases_of(_without_memory(config)), None)
    except BadModel:  # reported where folders are checked
        return
    if bias is None:
        yield (
            f"training.moe_router_bias_update_rate is {rate:g}, and the routers of the model in {path} "
            f"({config.model_type}) have no bias that balances experts: leave it out"
        )


def compact(experts: torch.Tensor | np.ndarray, num_experts: int) -> np.ndarray:
    """Return indices of experts in the smallest type that holds them: uint8, or uint16 for more than 256 experts."""
    values = experts.cpu().numpy() if isinstance(experts, torch.Tensor) else experts
    return values.astype(np.uint8 if num_experts <= 256 else np.uint16)


def with_replayed(own: RouterChoice, recorded: torch.Tensor, scores: torch.Tensor) -> RouterChoice:
    """Return the values and indices [T, top-k] that a router chooses, with recorded choices in their place and order.

    Args:
        own: values and indices [T, top-k] that the router would choose.
        recorded: [T, top-k] recorded indices, or FREE.
        scores: [T, experts] of the router.
    """
    values, indices = own
    free = recorded < 0
    indices = torch.where(free, indices, recorded.to(indices.dtype))
    return torch.where(free, values, scores.gather(-1, indices)), indices


def differing(own: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """Return a scalar: how many of the recorded experts [T, top-k] are missing in the router's `own` choice [T,
    top-k]."""
    there = (recorded.unsqueeze(-1) == own.unsqueeze(-2)).any(-1)
    return ((recorded >= 0) & ~there).sum()


def chosen_experts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the indices [T, top-k] that a router chose, from the arguments that the mixture passes to its experts."""
    return next(value for value in (*args, *kwargs.values()) if not value.is_floating_point())


class RouteRecorder:
    """Records the experts that a model's routers choose, from its construction on."""

    def __init__(self, model: PreTrainedModel) -> None:
        blocks = [*mixtures(model).values()]
        self.layers = len(blocks)
        self.num_experts = max((_num_experts(block) or 0 for block in blocks), default=0)
        self._seen: list[torch.Tensor | None] = [None] * self.layers
        for layer, block in enumerate(blocks):
            block.experts.register_forward_pre_hook(partial(self._see, layer), with_kwargs=True)

    def take(self) -> torch.Tensor:
        """Return the choices [T, layers, top-k] of the last forward pass over T concatenated tokens, and clear them.

        Without such layers the result is empty.
        """
        seen = [experts for experts in self._seen if experts is not None]
        self._seen = [None] * self.layers
        return torch.stack(seen, 1) if seen else torch.zeros(0, 0, 0, dtype=torch.int64)

    def _see(self, layer: int, experts: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._seen[layer] = chosen_experts(args, kwargs)


class RouteReplay:
    """Replaces the choices of a model's routers by recorded ones within `replaying`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._recorded: torch.Tensor | None = None
        self._running: list[_ReplayedChoice] = []
        self._differing: dict[int, torch.Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for layer, block in enumerate(mixtures(model).values()):
            self._handles.append(block.register_forward_pre_hook(partial(self._begin, layer)))
            self._handles.append(block.register_forward_hook(self._end, always_call=True))

    @contextmanager
    def replaying(self, recorded: torch.Tensor | None) -> Iterator[None]:
        """Replay recorded choices in the forward and backward passes within, recomputed layers included.

        Args:
            recorded: [T, layers, top-k] choices for the T concatenated tokens of a pass, FREE where none is recorded;
                None replays nothing.
        """
        self._recorded, self._differing = recorded, {}
        try:
            yield
        finally:
            self._recorded = None

    def differing(self) -> torch.Tensor:
        """Return how many of the replayed experts the routers would not have chosen in the last pass."""
        return torch.stack([*self._differing.values()]).sum() if self._differing else torch.zeros(())

    def _begin(self, layer: int, block: Any, args: Any) -> None:
        # Entered for each layer and not around the model: a thread of the autograd engine may recompute the layer.
        if self._recorded is not None:
            self._running.append(_ReplayedChoice(layer, self._recorded[:, layer], block.experts.num_experts))
            self._running[-1].__enter__()

    def _end(self, block: Any, args: Any, output: Any) -> None:
        if self._recorded is None:
            return
        mode = self._running.pop()
        mode.__exit__(None, None, None)
        if output is not None and mode.differing is None and not _follow_from_tokens(block):
            raise EngineError(
                f"The router of {type(block).__name__} does not choose its experts by topk: the choices of the rollout "
                "cannot be passed to it. Leave algorithm.use_rollout_routing_replay out."
            )
        if mode.differing is not None:
            self._differing[mode.layer] = mode.differing


class _ReplayedChoice(TorchFunctionMode):
    """Replaces the result of the `topk` over a router's scores for all experts."""

    def __init__(self, layer: int, recorded: torch.Tensor, num_experts: int) -> None:
        super().__init__()
        self.layer, self._recorded, self._num_experts = layer, recorded, num_experts
        self.differing: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            scores, (values, indices) = args[0], result
            if (scores.shape[-1], indices.shape) == (self._num_experts, self._recorded.shape):
                self.differing = differing(indices, self._recorded)
                return torch.return_types.topk(with_replayed((values, indices), self._recorded, scores))
        return result


def _num_experts(module: Any) -> int | None:
    """Return the number of experts of a mixture; None for another module."""
    experts = getattr(module, "experts", None)
    count = getattr(experts, "num_experts", None) if isinstance(experts, torch.nn.Module) else None
    return count if isinstance(count, int) else None


def _follow_from_tokens(block: Any) -> bool:
    """Whether a mixture takes its experts from a table of token ids (DeepSeek V4's first layers), so that the trainer's
    are the rollout's."""
    return hasattr(getattr(block, "gate", None), "tid2eid")


def _without_memory(config: PretrainedConfig) -> PreTrainedModel:
    """Return a model of a config.json on the meta device, without memory for weights."""
    with torch.device("meta"):
        model: PreTrainedModel = model_class(config).from_config(config)
    return model
