"""A model that Megatron trains, and its optimizer."""

import math
from collections.abc import Sequence
from typing import Any

from configs.schema.algorithm import AlgorithmConfig
from engines.training.batching import MicroBatch
from engines.training.megatron.model import clip_gradients
from engines.training.megatron.passes import Passes
from engines.training.megatron.state import State
from engines.types import TrainBatch


class MegatronLearner:
    """See engines.training.exactly_once.Learner."""

    def __init__(
        self, wrapped: Sequence[Any], optimizer: Any, state: State, passes: Passes, algorithm: AlgorithmConfig
    ):
        """
        Args:
            wrapped: the model's chunks in Megatron's DistributedDataParallel.
            passes: of these chunks.
        """
        self._wrapped, self._optimizer, self._state = wrapped, optimizer, state
        self._passes, self._algorithm = passes, algorithm

    def accumulate_gradients(
        self, batch: TrainBatch, micro_batches: Sequence[MicroBatch], weights: dict[int, float]
    ) -> dict[str, float]:
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        return self._passes.accumulate_gradients(batch, micro_batches, weights, self._algorithm)

    def grad_norm(self) -> float:
        overflowed = self._optimizer.prepare_grads()
        self._norm = math.inf if overflowed else float(self._optimizer.get_grad_norm())
        return self._norm

    def step(self, lr: float) -> None:
        self._state.set_learning_rate(lr)
        clip_gradients(self._optimizer, self._norm)
        self._optimizer.step_with_ready_grads()

    def set_steps(self, steps: int) -> None:
        self._state.set_steps(steps)
