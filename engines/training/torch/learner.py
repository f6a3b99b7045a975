"""A model trained with PyTorch, and its optimizer."""

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.published import biases_of
from cairn.engines.models.routing import RouteReplay
from cairn.engines.training.aggregations import Weight
from cairn.engines.training.batching import MicroBatch
from cairn.engines.training.checkpoint import NamedTensors
from cairn.engines.training.optimizer import MOMENTS, build_optimizer, set_position, set_rates
from cairn.engines.training.protocol import merge_over_ranks
from cairn.engines.training.sharding import recompute_activations, whole
from cairn.engines.training.torch.passes import Balance, Layout, Objective, accumulate_gradients, padded_rows
from cairn.engines.types.types import TrainBatch

# Offloading frees the GPU memory of a training state for a while; the state is restored bit for bit.


def offload(models: Sequence[PreTrainedModel], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Move models and optimizer states to host memory, pinned where a GPU will read it.

    Gradients are dropped: the next step computes its own.
    """
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    _move(models, optimizers, "cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def onload(
    models: Sequence[PreTrainedModel],
    optimizers: Sequence[torch.optim.Optimizer],
    device: torch.device,
    *,
    keep_shards: bool = False,
) -> None:
    """Move what was offloaded back to the device.

    Args:
        keep_shards: leave shards, and their moments, on the host, where they are used.
    """
    _move(models, optimizers, device, keep_shards=keep_shards)


def _move(
    models: Sequence[PreTrainedModel],
    optimizers: Sequence[torch.optim.Optimizer],
    device: str | torch.device,
    *,
    keep_shards: bool = False,
) -> None:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if keep_shards and isinstance(tensor, DTensor):
            return tensor
        on_host = torch.device(device).type == "cpu"
        if on_host and tensor.is_cuda and not isinstance(tensor, DTensor):
            return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)
        return tensor.to(device)

    with torch.no_grad():
        for model in models:
            model._apply(moved)  # like `to`, with pinned memory; parameters stay the same objects
        for optimizer in optimizers:
            for state in optimizer.state.values():
                for name in MOMENTS:
                    state[name] = moved(state[name])


class TorchLearner:
    """A `cairn.engines.training.exactly_once.Learner` on PyTorch."""

    def __init__(
        self,
        model: PreTrainedModel,
        objective: Objective,
        training: TrainingConfig,
        world_size: int,
        replay: RouteReplay | None = None,
        layout: Layout = padded_rows,
    ):
        """
        Args:
            model: whole, or sharded over all ranks.
            objective: loss and metrics of the model's outputs at the trained tokens.
            replay: expert replay of the model, where it uses the rollout's experts.
            layout: how the model reads the samples of a micro-batch.
        """
        self.model, self._objective, self._replay, self._layout = model, objective, replay, layout
        self._clip_grad, self._world_size = training.clip_grad, world_size
        if training.gradient_checkpointing:
            recompute_activations(model)
        named = list(model.named_parameters())
        rate = training.moe_router_bias_update_rate
        self._balance = Balance(model, rate) if rate else None
        self._trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._stored = self._trained if training.lora.r else named
        self.names = {name for name, _ in (*self._stored, *self._moved_biases())}
        self.frozen = self.names - {name for name, _ in self._trained}
        self.optimizer = build_optimizer(
            [parameter for _, parameter in self._trained],
            training,
            fused=training.fsdp_cpu_offload or any(parameter.is_cuda for _, parameter in self._trained),
        )

    def accumulate_gradients(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], weights: dict[int, Weight]
    ) -> dict[str, float]:
        self.optimizer.zero_grad()
        if self._balance is not None:
            self._balance.forget()
        shares = accumulate_gradients(
            self.model, batch, micro_batches, weights, self._objective, self._replay, self._balance, self._layout
        )
        return merge_over_ranks(shares, self._world_size)

    def gradients(self) -> Iterator[torch.Tensor]:
        gradients = (parameter.grad for _, parameter in self._trained if parameter.grad is not None)
        return (gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients)

    def grad_norm(self) -> float:
        gradients = [p.grad for _, p in self._trained if p.grad is not None]
        self._norm = torch.nn.utils.get_total_norm(gradients)
        return whole(self._norm).item()

    def step(self, lr: float, weight_decay: float) -> None:
        if self._clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_([p for _, p in self._trained], self._clip_grad, self._norm)
        set_rates(self.optimizer, lr, weight_decay)
        self.optimizer.step()
        if self._balance is not None:
            self._balance.update(self._world_size)

    def forget_moments(self) -> None:
        for state in self.optimizer.state.values():
            for kind in MOMENTS:
                state[kind].zero_()

    def set_steps(self, steps: int) -> None:
        set_position(self.optimizer, steps)

    def state(self) -> dict[str, NamedTensors]:
        """Return every tensor of the state, by its kind.

        The state has the parameters (frozen ones too, except those next to adapters), the routers' biases where steps
        update them, and the optimizer's moments of each trained parameter.
        """
        moments = {kind: [(name, self.optimizer.state[p][kind]) for name, p in self._trained] for kind in MOMENTS}
        return {"parameters": [(name, p.detach()) for name, p in (*self._stored, *self._moved_biases())], **moments}

    def _moved_biases(self) -> NamedTensors:
        """Return the routers' biases; empty without an update rate, since they are then those of the model's folder."""
        return [] if self._balance is None else [*biases_of(self.model)]
