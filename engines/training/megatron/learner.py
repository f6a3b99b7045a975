"""A model that Megatron trains, and its optimizer."""

import math
from collections.abc import Sequence

import torch

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.training.aggregations import Weight
from cairn.engines.training.batching import MicroBatch
from cairn.engines.training.megatron.balance import Balance
from cairn.engines.training.megatron.model import Model, build_optimizer, clip_gradients, has_experts, wrap
from cairn.engines.training.megatron.passes import Objective, Passes, Reading
from cairn.engines.training.megatron.replay import Replay
from cairn.engines.training.megatron.state import State
from cairn.engines.types import TrainBatch


class MegatronLearner:
    """See cairn.engines.training.exactly_once.Learner."""

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
            objective: of what the model's output layer gives at the trained tokens.
            reading: of what it gives at response tokens, to score.
            prefix: of its tensors' names in the engine's state.
            replays: whether its routers are given the experts of the rollout.
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
        """See cairn.engines.training.exactly_once.Scorer."""
        return self._passes.score_responses(batch, micro_batches, self._reading)
