"""The training engine for any Hugging Face causal LM: PyTorch, with FSDP2 over more than one rank."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from configs.schema.algorithm import AlgorithmConfig
from configs.schema.run import ModelConfig
from configs.schema.training import TrainingConfig
from engines.errors import EngineError, WrongVersion
from engines.models import load_causal_lm
from engines.training.batching import MicroBatch, plan_micro_batches, split_steps
from engines.training.checkpoint import (
    NamedTensors,
    gather_files,
    in_buckets,
    read_description,
    read_state,
    write_state,
)
from engines.training.digest import sharded_weights_checksum, state_digest
from engines.training.errors import NotFinite
from engines.training.export import save_model_folder, whole_parameters
from engines.training.losses.aggregate import token_weights
from engines.training.losses.metrics import merge_over_ranks, over_steps
from engines.training.offload import offload, onload
from engines.training.optimizer import MOMENTS, build_optimizer, learning_rate, set_learning_rate, set_position
from engines.training.passes import accumulate_gradients, score_responses
from engines.training.process import prepare_process
from engines.training.sharding import raise_together, recompute_activations, shard_model, whole
from engines.training.validate import check_batch, check_trainable
from engines.types import Position, TrainBatch, TrainResult
from storage.errors import Damaged
from storage.store import Store


class TorchEngine:
    """A `TrainingEngine` (see engines.training.base for the contract of every method).

    Master weights and optimizer state are float32. In bfloat16 forward and backward run on bfloat16 copies of the
    weights, as FSDP2's mixed precision makes them, so log-probs are those of a rollout engine that holds bfloat16.
    The model stays in evaluation mode: dropout would make log-probs differ from the rollout's.
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
        """Load the model and, with `algorithm.use_kl_loss`, the reference.

        Args:
            temperature: of the rollout; divides the logits.
            total_steps: optimizer steps of the whole run, over which the learning rate decays by default.
            world_size: ranks; a process group of as many must exist if there is more than one.
        """
        self._training, self._algorithm, self._temperature = training, algorithm, temperature
        self._total_steps = total_steps
        self._rank, self._world_size = rank, world_size
        self._device = torch.device(device)
        prepare_process(training, self._device)
        self._dtype = getattr(torch, training.dtype)
        self._model = self._load_model(model.path, torch.float32)
        if training.gradient_checkpointing:
            recompute_activations(self._model)
        self._reference = None
        if algorithm.use_kl_loss:
            self._reference = self._load_model(model.ref_path or model.path, self._dtype).requires_grad_(False)
        self._optimizer = build_optimizer(self._model.parameters(), training)
        self._version = 0
        self._digest: str | None = None
        self._last: tuple[str, TrainResult] | None = None
        self._interrupted: str | None = None
        self._offloaded = False

    def position(self) -> Position:
        self._require_intact()
        input_digest, result = self._last or (None, None)
        return Position(self._version, self.state_digest(), input_digest, result)

    def train(self, batch: TrainBatch, *, num_steps: int, expected_version: int, input_digest: str) -> TrainResult:
        started = time.perf_counter()
        self._require_ready()
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
        self._require_ready()
        check_batch(batch)
        model = self._model if role == "actor" else self._reference
        if model is None:
            raise ValueError("the reference model is not loaded: set algorithm.use_kl_loss to have it")
        lengths = {i: len(ids) for i, ids in enumerate(batch.input_ids) if batch.response_lengths[i]}
        log_probs = score_responses(model, batch, self._plan(lengths), self._temperature)
        if self._world_size > 1:
            dist.all_reduce(log_probs)  # of one value and zeros: exact
        return np.split(log_probs.cpu().numpy(), np.cumsum(batch.response_lengths)[:-1])

    def export_weights(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        self._require_intact()
        yield from in_buckets(self._exported(), bucket_bytes)

    def export_on_device(self, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
        self._require_intact()
        parameters = whole_parameters(self._model, self._device)
        yield from in_buckets(((name, full.to(self._device, self._dtype)) for name, full in parameters), bucket_bytes)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        self._require_ready()
        dtypes = [self._dtype, getattr(torch, dtype)]
        return sharded_weights_checksum(self._model.named_parameters(), dtypes, self._world_size)

    def export_hf(self, folder: Path) -> None:
        self._require_intact()
        weights = dict(self._exported())
        if self._rank == 0:
            save_model_folder(self._model, weights, folder)

    def save(self, store: Store, folder: str) -> list[str]:
        self._require_ready()
        digest = self.state_digest()
        paths, error = [], None
        files = gather_files(self._state(), keep=self._rank == 0)
        try:
            if self._rank == 0:
                paths = write_state(store, folder, files, weight_version=self._version, state_digest=digest)
        except Exception as failure:  # raised below, once the other ranks are free
            error = failure
        for _ in files:  # the gathering goes on to its end on every rank
            pass
        raise_together(error, self._world_size, self._device)
        return paths

    def load(self, store: Store, folder: str) -> None:
        self._require_onloaded()
        error = None
        try:
            state = read_description(store, folder)
            self._interrupted = "load"
            with torch.no_grad():
                read_state(store, folder, state, self._state())
        except Exception as failure:  # raised below, once every rank has come here
            error = failure
        raise_together(error, self._world_size, self._device)
        set_position(self._optimizer, state.weight_version)
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
            named_tensors = [
                (f"{kind}.{name}", tensor) for kind, tensors in self._state().items() for name, tensor in tensors
            ]
            self._digest = state_digest(named_tensors, self._version, self._world_size)
        return self._digest

    def offload(self) -> None:
        self._require_intact()
        if not self._offloaded:
            self.state_digest()  # of the position, which is asked for at any time
            offload(self._models(), self._optimizer)
            self._offloaded = True

    def onload(self) -> None:
        if self._offloaded:
            onload(self._models(), self._optimizer, self._device)
            self._offloaded = False

    def health(self) -> dict[str, Any]:
        return {
            "engine": "torch",
            "rank": self._rank,
            "world_size": self._world_size,
            "device": str(self._device),
            "weight_version": self._version,
            "intact": self._interrupted is None,
            "offloaded": self._offloaded,
        }

    def _update(self, batch: TrainBatch, samples: range) -> dict[str, float]:
        """One optimizer step; returns its metrics."""
        mask_sums = [int(batch.loss_mask[i].sum()) for i in samples]
        weights = dict(
            zip(samples, token_weights(mask_sums, per_token=self._algorithm.calculate_per_token_loss), strict=True)
        )
        lengths = {i: len(batch.input_ids[i]) for i, count in zip(samples, mask_sums, strict=True) if count}
        self._optimizer.zero_grad()
        shares = accumulate_gradients(
            self._model, batch, self._plan(lengths), weights, self._algorithm, self._temperature
        )
        metrics = merge_over_ranks(shares, self._world_size)
        parameters = list(self._model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        metrics["grad_norm"] = whole(norm).item()
        self._require_finite(metrics)
        if self._training.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self._training.clip_grad, norm)
        metrics["lr"] = learning_rate(self._training, self._version, self._total_steps)
        set_learning_rate(self._optimizer, metrics["lr"])
        self._interrupted = "train"
        self._optimizer.step()
        self._move_to(self._version + 1)
        return metrics

    def _models(self) -> list[PreTrainedModel]:
        return [self._model] if self._reference is None else [self._model, self._reference]

    def _load_model(self, path: str, parameters: torch.dtype) -> PreTrainedModel:
        """Load a model that computes in the training's number format, whatever its parameters are held in."""
        if self._world_size == 1 and parameters == self._dtype:
            return load_causal_lm(path, parameters, str(self._device))
        model = load_causal_lm(path, parameters)
        shard_model(model, self._dtype, self._world_size, self._device)
        return model

    def _plan(self, lengths: dict[int, int]) -> list[MicroBatch]:
        return plan_micro_batches(lengths, self._training.max_tokens_per_gpu, self._world_size)[self._rank]

    def _state(self) -> dict[str, NamedTensors]:
        """Every tensor of the state, by its kind: parameters and the optimizer's moments of each."""
        named = list(self._model.named_parameters())
        moments = {kind: [(name, self._optimizer.state[p][kind]) for name, p in named] for kind in MOMENTS}
        return {"parameters": [(name, p.detach()) for name, p in named], **moments}

    def _exported(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters in the training's number format, copied to the CPU; on rank 0 alone, gathered from all."""
        for name, full in whole_parameters(self._model, self._device):
            if self._rank == 0:
                yield name, full.to("cpu", self._dtype, copy=True)

    def _require_finite(self, metrics: dict[str, float]) -> None:
        if not (math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])):
            broken = ", ".join(f"{name} = {value}" for name, value in metrics.items() if not math.isfinite(value))
            raise NotFinite(
                f"the update of weight version {self._version} has {broken}; the weights were left as they are. "
                "Look at the batch's advantages and log-probs, or lower training.lr"
            )

    def _require_ready(self) -> None:
        self._require_intact()
        self._require_onloaded()

    def _require_onloaded(self) -> None:
        if self._offloaded:
            raise EngineError("the training engine is offloaded: onload it first")

    def _require_intact(self) -> None:
        if self._interrupted is not None:
            raise EngineError(
                f"the training engine was interrupted in {self._interrupted}(): its state is neither the old nor the "
                "new one; load a checkpoint"
            )

    def _move_to(self, version: int) -> None:
        self._version, self._digest = version, None
