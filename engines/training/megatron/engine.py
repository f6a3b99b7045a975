"""The production training engine: megatron-core, with every parallelism it has."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from megatron.core import parallel_state

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.run import ModelConfig
from configs.schema.training import TrainingConfig
from engines.errors import EngineError, WrongVersion
from engines.training.batching import MicroBatch, plan_micro_batches, split_steps
from engines.training.checkpoint import in_buckets
from engines.training.errors import NotFinite
from engines.training.losses.aggregate import token_weights
from engines.training.losses.metrics import over_steps
from engines.training.megatron import checkpoint
from engines.training.megatron.backend import backend_for
from engines.training.megatron.folder import write_model_folder
from engines.training.megatron.model import build_optimizer, clip_gradients, join_groups, load_model, wrap
from engines.training.megatron.passes import Passes
from engines.training.megatron.state import State
from engines.training.optimizer import learning_rate
from engines.training.process import join_process_group, prepare_process
from engines.training.sharding import raise_together
from engines.training.validate import check_batch, check_trainable
from engines.types import Position, TrainBatch, TrainResult
from storage.errors import Damaged
from storage.store import Store


class MegatronEngine:
    """A `TrainingEngine` (see engines.training.base for the contract of every method).

    Import this only where `engines.training.megatron.backend.backend_for` has prepared megatron-core, as
    `engines.training.factory` does. Master weights and optimizer state are float32. A process holds one engine at a
    time: Megatron's process groups are global.
    """

    def __init__(
        self,
        model: ModelConfig,
        training: TrainingConfig,
        algorithm: AlgorithmConfig,
        *,
        temperature: float,
        total_steps: int,
        rank: int = 0,
        world_size: int = 1,
        device: str = "cpu",
    ):
        """See `engines.training.torch.TorchEngine`.

        Raises:
            BadModel: the folder cannot be used, or its model is of a family that Megatron has no mapping for.
        """
        self._training, self._algorithm, self._total_steps = training, algorithm, total_steps
        self._rank, self._world_size = rank, world_size
        self._device = torch.device(device)
        self._dtype = getattr(torch, training.dtype)
        self._folder = Path(model.path)
        prepare_process(training, self._device)
        join_process_group(world_size)
        join_groups(training)
        backend = backend_for(self._device)
        actor = load_model(self._folder, training, backend)
        self._chunks = actor.chunks
        self._wrapped = wrap(actor, training)
        self._optimizer = build_optimizer(training, actor, self._wrapped)
        self._state = State(actor.parameters, self._optimizer)
        self._passes = Passes(actor.config, self._wrapped, actor.vocabulary, temperature, self._device)
        self._reference = None
        if algorithm.use_kl_loss:
            ref = load_model(Path(model.ref_path or model.path), training, backend, trained=False)
            self._reference = Passes(ref.config, ref.chunks, ref.vocabulary, temperature, self._device)
        self._version = 0
        self._digest: str | None = None
        self._last: tuple[str, TrainResult] | None = None
        self._interrupted: str | None = None

    def position(self) -> Position:
        self._require_intact()
        input_digest, result = self._last or (None, None)
        return Position(self._version, self.state_digest(), input_digest, result)

    def train(self, batch: TrainBatch, *, num_steps: int, expected_version: int, input_digest: str) -> TrainResult:
        started = time.perf_counter()
        self._require_intact()
        if expected_version != self._version:
            raise WrongVersion(
                f"the training engine is at weight version {self._version}, not at {expected_version}; "
                "nothing was changed"
            )
        steps = split_steps(len(batch), num_steps)
        check_trainable(batch, steps, self._algorithm)
        # A failure of one rank alone leaves the others inside a collective: with several ranks any may be that.
        self._interrupted = "train" if self._world_size > 1 else None
        try:
            metrics = [self._update(batch, samples) for samples in steps]
        except NotFinite:
            if self._version == expected_version:  # raised by all ranks, before the first change
                self._interrupted = None
            raise
        self._interrupted = None
        result = TrainResult(
            weight_version=self._version,
            state_digest=self.state_digest(),
            metrics=over_steps(metrics),
            seconds=time.perf_counter() - started,
            tokens=sum(map(len, batch.input_ids)),
        )
        self._last = (input_digest, result)
        return result

    def score(self, batch: TrainBatch, role: Literal["actor", "ref"]) -> list[np.ndarray]:
        self._require_intact()
        check_batch(batch)
        passes = self._passes if role == "actor" else self._reference
        if passes is None:
            raise ValueError("the reference model is not loaded: set algorithm.use_kl_loss to have it")
        lengths = {i: len(ids) for i, ids in enumerate(batch.input_ids) if batch.response_lengths[i]}
        log_probs = passes.score_responses(batch, self._plan(lengths))
        return np.split(log_probs.cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])

    def export_weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        self._require_intact()
        yield from in_buckets(self._state.gather_weights(self._dtype), bucket_bytes)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        self._require_intact()
        return self._state.weights_checksum([self._dtype, getattr(torch, dtype)])

    def export_hf(self, folder: Path) -> None:
        self._require_intact()
        write_model_folder(
            self._folder, self._state.gather_weights(self._dtype), folder, dtype=self._dtype, write=self._rank == 0
        )

    def save(self, store: Store, folder: str) -> list[str]:
        self._require_intact()
        # Megatron does not write a count of 0 steps, and torch's Adam does not load without one; `load` sets it anyway.
        self._state.set_steps(max(1, self._version))
        try:
            return checkpoint.save(
                store,
                folder,
                self._chunks,
                self._optimizer,
                weight_version=self._version,
                state_digest=self.state_digest(),
            )
        finally:
            self._state.set_steps(self._version)

    def load(self, store: Store, folder: str) -> None:
        error = None
        try:
            state = checkpoint.read_description(store, folder)
        except Exception as failure:  # raised below, once every rank has come here
            error = failure
        raise_together(error, self._world_size, self._device)
        self._interrupted = "load"
        checkpoint.load(store, folder, state, self._chunks, self._optimizer)
        self._state.set_steps(state.weight_version)
        self._move_to(state.weight_version)
        self._last = None
        found = self.state_digest()
        if found != state.state_digest:
            raise Damaged(
                f"checkpoint {folder} is damaged: what was loaded has digest {found}, {state.state_digest} was saved"
            )
        self._interrupted = None

    def state_digest(self) -> str:
        if self._digest is None:
            self._digest = self._state.digest(self._version)
        return self._digest

    def health(self) -> dict[str, Any]:
        return {
            "engine": "megatron",
            "rank": self._rank,
            "world_size": self._world_size,
            "device": str(self._device),
            "weight_version": self._version,
            "intact": self._interrupted is None,
        }

    def _update(self, batch: TrainBatch, samples: range) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        mask_sums = [int(batch.loss_mask[i].sum()) for i in samples]
        weights = dict(
            zip(samples, token_weights(mask_sums, per_token=self._algorithm.calculate_per_token_loss), strict=True)
        )
        lengths = {i: len(batch.input_ids[i]) for i, count in zip(samples, mask_sums, strict=True) if count}
        for chunk in self._wrapped:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        metrics = self._passes.accumulate_gradients(batch, self._plan(lengths), weights, self._algorithm)
        overflowed = self._optimizer.prepare_grads()
        metrics["grad_norm"] = math.inf if overflowed else float(self._optimizer.get_grad_norm())
        self._require_finite(metrics)
        metrics["lr"] = learning_rate(self._training, self._version, self._total_steps)
        self._state.set_learning_rate(metrics["lr"])
        self._interrupted = "train"
        clip_gradients(self._optimizer, metrics["grad_norm"])
        self._optimizer.step_with_ready_grads()
        self._move_to(self._version + 1)
        return metrics

    def _plan(self, lengths: dict[int, int]) -> list[MicroBatch]:
        """This rank's micro-batches, as many as all others' and, in a pipeline, a multiple of its stages."""
        training = self._training
        ranks, multiple = training.data_parallel_size, training.pipeline_model_parallel_size
        limit = training.max_tokens_per_gpu
        if limit is not None:
            limit *= training.context_parallel_size
        plan = plan_micro_batches(lengths, limit, ranks * multiple)
        rank = parallel_state.get_data_parallel_rank()
        mine = plan[rank * multiple : (rank + 1) * multiple]
        return [micro_batch for round_ in zip(*mine, strict=True) for micro_batch in round_]

    def _require_finite(self, metrics: dict[str, float]) -> None:
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            broken = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
            raise NotFinite(
                f"the update of weight version {self._version} has {broken}; the weights were left as they are. "
                "Look at the batch's advantages and log-probs, or lower training.lr"
            )

    def _require_intact(self) -> None:
        if self._interrupted is not None:
            raise EngineError(
                f"the training engine was interrupted in {self._interrupted}(): its state is neither the old nor the "
                "new one; load a checkpoint"
            )

    def _move_to(self, version: int) -> None:
        self._version, self._digest = version, None
