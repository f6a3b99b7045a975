"""A model that Megatron trains, and its optimizer."""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.aggregations import Weight
from cairn.engines.training.batching import MicroBatch
from cairn.engines.training.checkpoint import REFERENCE
from cairn.engines.training.megatron.model import Model, build_optimizer, clip_gradients, has_experts, wrap
from cairn.engines.training.megatron.passes import Objective, Passes, Reading
from cairn.engines.training.megatron.routers import Balance, Replay
from cairn.engines.training.megatron.state import Fingerprints, Piece, State, sharded_fingerprints
from cairn.engines.training.megatron.weights import Block, Ownership, Parameter, regions
from cairn.engines.training.parts import NamedParts
from cairn.engines.types.types import TrainBatch


class Reference:
    """This rank's part of a reference that takes the actor's weights at an interval, cut like the actor.

    No optimizer changes it, but it is part of the state.
    """

    def __init__(self, model: Model) -> None:
        """Determine with all ranks which rank owns each block."""
        self.chunks, self._parameters = model.chunks, model.parameters
        self._ownership = Ownership.agree(model.parameters)

    @torch.no_grad()
    def copy_from(self, actor: State) -> None:
        """Copy the actor's weights, in the number format of the passes."""
        for parameter, value in zip(self._parameters, actor.values, strict=True):
            parameter.value.copy_(value)

    def parts(self, *, owned: bool) -> NamedParts:
        """Return the parts of whole tensors that this rank holds, or with `owned` those that it owns."""
        for parameter in self._parameters:
            blocks = self._owned(parameter) if owned else parameter.blocks
            yield from regions(f"{REFERENCE}.", blocks, parameter.value.detach().view(-1))

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of all whole tensors, named as in `cairn.engines.training.sharding.state_digest`.

        All ranks take part.
        """
        kind, values = f"{REFERENCE}.", [parameter.value.detach() for parameter in self._parameters]

        def pieces() -> Iterator[Piece]:
            for parameter, value in zip(self._parameters, values, strict=True):
                yield Piece(kind, value.reshape(-1), 0, self._owned(parameter))

        return sharded_fingerprints(
            pieces(), {kind: self._ownership.tensors()}, self._ownership, str(values[0].dtype), values[0].device
        )

    def _owned(self, parameter: Parameter) -> list[Block]:
        return [block for block in parameter.blocks if self._ownership.owner(block) == dist.get_rank()]


class MegatronLearner:
    """A `cairn.engines.training.exactly_once.Learner` on Megatron."""

    def __init__(
        self,
        model: Model,
        objective: Objective,
        reading: Reading,
        training: TrainingConfig,
        prefix: str = "",
        *,
        replays: bool = False,
    ) -> None:
        """
        Args:
            objective: loss and metrics of the model's outputs at the trained tokens.
            reading: scores from the model's outputs at response tokens.
            prefix: prefix of its tensors' names in the engine's state.
            replays: whether its routers use the experts of the rollout.
        """
        self.chunks, self._objective, self._reading = model.chunks, objective, reading
        self._wrapped = wrap(model, training)
        self.optimizer = build_optimizer(training, model, self._wrapped)
        self.state = State(model.parameters, self.optimizer, prefix)
        replay = Replay(model.config, self._wrapped, has_experts) if replays else None
        rate = training.moe_router_bias_update_rate
        self._balance = Balance(model.config, self._wrapped, rate) if rate else None
        device = model.parameters[0].value.device
        self._passes = Passes(model.config, self._wrapped, device, replay, self._balance)
        self.alignment = self._passes.alignment

    def accumulate_gradients(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], weights: dict[int, Weight]
    ) -> dict[str, float]:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self._balance is not None:
            self._balance.forget()
        return self._passes.accumulate_gradients(batch, micro_batches, weights, self._objective)

    def gradients(self) -> Iterator[torch.Tensor]:
        for chunk in self._wrapped:
            yield from (buffer.grad_data for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))

    def grad_norm(self) -> float:
        overflowed = self.optimizer.prepare_grads()
        self._norm = math.inf if overflowed else float(self.optimizer.get_grad_norm())
        return self._norm

    def step(self, lr: float, weight_decay: float) -> None:
        self.state.set_rates(lr, weight_decay)
        clip_gradients(self.optimizer, self._norm)
        self.optimizer.step_with_ready_grads()
        if self._balance is not None:
            self._balance.update()

    def forget_moments(self) -> None:
        self.state.forget_moments()

    def set_steps(self, steps: int) -> None:
        self.state.set_steps(steps)

    def score(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """Return scores like a `cairn.engines.training.exactly_once.Scorer`."""
        return self._passes.score_responses(batch, micro_batches, self._reading)
