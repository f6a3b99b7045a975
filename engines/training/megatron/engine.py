"""Production training engine: megatron-core, with every parallelism it has."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.fingerprint import MEGATRON
from cairn.engines.training.batching import MicroBatch, pack_micro_batches
from cairn.engines.training.collate import Tokens
from cairn.engines.training.exactly_once import ExactlyOnceEngine, untrained_models
from cairn.engines.training.log_probs import IMPOSSIBLE_LOGIT, mask_outside_support, top_rows
from cairn.engines.training.losses.objective import Metrics, loss_and_metrics
from cairn.engines.training.losses.value import value_objective
from cairn.engines.training.megatron import checkpoint
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.folder import FILE_BYTES, write_model_folder
from cairn.engines.training.megatron.learner import MegatronLearner, Reference
from cairn.engines.training.megatron.model import join_groups, load_model, read_values
from cairn.engines.training.megatron.packing import padded_length
from cairn.engines.training.megatron.passes import Passes
from cairn.engines.training.megatron.state import Memory
from cairn.engines.training.needs import has_critic, is_policy_gradient, teacher_top_k
from cairn.engines.training.process import join_process_group, prepare_process
from cairn.engines.training.sharding import raising_together
from cairn.engines.training.top_k import row_shape
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.checksum import digest
from cairn.storage.store.store import Store, StoredFile


class Policy:
    """Loss and log-probs of the policy, where each tensor-parallel rank has the logits of a part of the vocabulary.

    The logits are divided by the rollout's temperature. Padding of the vocabulary and tokens outside the sampling
    support do not count.
    """

    def __init__(self, vocabulary: int, temperature: float) -> None:
        self._vocabulary, self._temperature = vocabulary, temperature

    def objective(
        self, outputs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the same as `cairn.engines.training.losses.objective.objective`."""
        logits = self._logits(outputs, tokens)
        if tokens.teacher_top_ids is not None:
            tokens = replace(tokens, top_log_probs=log_probs_at(logits, tokens.teacher_top_ids))
        entropies = None
        if is_policy_gradient(algorithm):
            entropies = entropy_of(logits, differentiable=algorithm.entropy_coef > 0)
        return loss_and_metrics(log_probs_of(logits, tokens.targets), entropies, tokens, algorithm)

    def read(self, outputs: torch.Tensor, tokens: Tokens, top_k: int = 0) -> torch.Tensor:
        """Return [N] log-probs of the tokens.

        With `top_k`, return rows with the most probable tokens too (`cairn.engines.training.log_probs.top_rows`).
        """
        logits = self._logits(outputs, tokens)
        log_probs = log_probs_of(logits, tokens.targets)
        return top_rows(log_probs, *most_probable(logits, top_k)) if top_k else log_probs

    def _logits(self, outputs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        logits = mask_vocabulary_padding(outputs / self._temperature, self._vocabulary)
        return mask_outside_support(logits, tokens.kept, _first_token(logits))


def mask_vocabulary_padding(logits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return [N, V / ranks] logits in which tokens beyond the model's vocabulary are impossible."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    width = logits.shape[-1]
    if width * ranks == vocabulary:
        return logits
    first = _first_token(logits)
    filling = torch.arange(first, first + width, device=logits.device) >= vocabulary
    return logits.masked_fill(filling, IMPOSSIBLE_LOGIT)


def log_probs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the [N] log-probability of each target, the same on all tensor-parallel ranks.

    This uses Megatron's unfused cross-entropy, which overwrites its input. The fused one rounds its gradient to
    bfloat16.

    Args:
        logits: [N, V / ranks] float32.
        targets: [N] int64.
    """
    return -vocab_parallel_cross_entropy(logits.clone(), targets)


def entropy_of(logits: torch.Tensor, *, differentiable: bool) -> torch.Tensor:
    """Return [N] entropies of the next-token distributions, in nats.

    The entropy is the log-sum-exp of the logits minus the expected logit.

    Args:
        logits: [N, V / ranks] float32.
    """
    shifted, normalizer = _normalized(logits if differentiable else logits.detach())
    probabilities = (shifted - copy_to_tensor_model_parallel_region(normalizer).unsqueeze(-1)).exp()
    return normalizer - reduce_from_tensor_model_parallel_region((probabilities * shifted).sum(-1))


def log_probs_at(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return [N, k] log-probabilities of several tokens at each position, the same on all tensor-parallel ranks.

    Args:
        logits: [N, V / ranks] float32.
        ids: [N, k] int64.
    """
    shifted, normalizer = _normalized(logits)
    width = logits.shape[-1]
    places = ids - _first_token(logits)
    elsewhere = (places < 0) | (places >= width)
    own = shifted.gather(-1, places.clamp(0, width - 1)).masked_fill(elsewhere, 0)
    return reduce_from_tensor_model_parallel_region(own) - normalizer.unsqueeze(-1)


@torch.no_grad()
def most_probable(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N, k] log-probabilities and [N, k] int64 ids of the k most probable tokens, from the most probable on.

    They are the k largest among each rank's k largest, so they are the same on all tensor-parallel ranks.

    Args:
        logits: [N, V / ranks] float32.
    """
    shifted, normalizer = _normalized(logits)
    own = shifted.topk(min(k, logits.shape[-1]))
    values, ids = _all_ranks(own.values), _all_ranks(own.indices + _first_token(logits))
    top = values.topk(k)
    return top.values - normalizer.unsqueeze(-1), ids.gather(-1, top.indices)


def _normalized(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [N, V / ranks] logits minus the largest of their position, and [N] the log-sum-exp of these over all
    ranks."""
    highest = logits.detach().max(-1).values
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=parallel_state.get_tensor_model_parallel_group())
    shifted = logits - highest.unsqueeze(-1)
    return shifted, reduce_from_tensor_model_parallel_region(shifted.exp().sum(-1)).log()


def _first_token(logits: torch.Tensor) -> int:
    """Return the token id of this rank's first logit."""
    return int(parallel_state.get_tensor_model_parallel_rank()) * logits.shape[-1]


def _all_ranks(values: torch.Tensor) -> torch.Tensor:
    """Return [N, ranks × columns], concatenated from [N, columns] of each tensor-parallel rank."""
    parts = [torch.empty_like(values) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, values.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)


class MegatronEngine(ExactlyOnceEngine):
    """A `TrainingEngine` (see cairn.engines.training.base for the contract of every method).

    Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core, as
    `cairn.engines.training.factory` does. Master weights and optimizer state are float32. A process holds one engine at
    a time: Megatron's process groups are global.
    """

    _packages = MEGATRON

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
        """Load the models as `cairn.engines.training.torch.engine.TorchEngine` does; the arguments are the same.

        Raises:
            BadModel: the folder cannot be used, or Megatron has no mapping for the family of its model.
        """
        super().__init__(training, algorithm, total_steps=total_steps, rank=rank, world_size=world_size, device=device)
        self._folder = Path(model.path)
        prepare_process(training, self._device)
        join_process_group(world_size)
        join_groups(training)
        backend = backend_for(self._device)
        actor = load_model(self._folder, training, backend)
        policy = Policy(actor.vocabulary, temperature)
        self._actor = MegatronLearner(
            actor,
            partial(policy.objective, algorithm=algorithm),
            policy.read,
            training,
            replays=algorithm.use_rollout_routing_replay,
        )
        self._learners: dict[str, MegatronLearner] = {"actor": self._actor}
        self._scorers = {"actor": self._actor.score}
        if has_critic(algorithm):
            critic = load_model(Path(model.critic_path or model.path), training, backend, critic=True)
            value = partial(value_objective, value_clip=algorithm.value_clip)
            self._learners["critic"] = MegatronLearner(critic, value, read_values, training.of_critic, "critic.")
            self._scorers["critic"] = self._learners["critic"].score
        self._frozen: list[torch.Tensor] = []
        self._reference: Reference | None = None
        """Reference that takes the actor's weights at an interval and is therefore part of the state."""
        self._frozen_memory = Memory(self._device)
        for role, path in untrained_models(model, algorithm).items():
            frozen = load_model(Path(path), training, backend, trained=False)
            passes = Passes(frozen.config, frozen.chunks, self._device)
            self._frozen += [parameter.value for parameter in frozen.parameters]
            if role == "ref" and algorithm.ref_update_interval is not None:
                self._reference = Reference(frozen)
            top_k = teacher_top_k(algorithm) if role == "teacher" else 0
            reading = partial(Policy(frozen.vocabulary, temperature).read, top_k=top_k)
            self._scorers[role] = partial(passes.score_responses, reading=reading, shape=row_shape(top_k))

    def export_weights(self, bucket_bytes: int, *, on_device: bool = False) -> Iterator[Bucket]:
        self._require_intact()
        for bucket in self._actor.state.gather_weights(self._dtype, bucket_bytes):
            yield bucket if on_device else bucket.on_host()

    def export_on_device(self, bucket_bytes: int) -> Iterator[Bucket]:
        self._require_intact()
        yield from self._actor.state.gather_weights(self._dtype, bucket_bytes, everywhere=True)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        self._require_ready()
        return self._actor.state.weights_checksum([self._dtype, getattr(torch, dtype)])

    def export_hf(self, folder: Path) -> None:
        self._require_intact()
        weights = chain.from_iterable(bucket.items() for bucket in self.export_weights(FILE_BYTES))
        write_model_folder(self._folder, weights, folder, dtype=self._dtype, write=self._rank == 0)

    def save(self, store: Store, folder: str) -> list[StoredFile]:
        self._require_ready()
        return checkpoint.save(
            store,
            folder,
            self._learners,
            self._reference,
            weight_version=self._version,
            state_digest=self.state_digest(),
        )

    def load(self, store: Store, folder: str) -> None:
        self._require_onloaded()
        with raising_together(self._world_size, self._device):
            state = checkpoint.read_description(store, folder, self._learners, self._reference)
        self._interrupted = "load"
        checkpoint.load(store, folder, state, self._learners, self._reference, self._device)
        self._end_load(folder, weight_version=state.weight_version, state_digest=state.state_digest)

    def offload(self) -> None:
        self._require_intact()
        if not self._offloaded:
            self.state_digest()  # part of the position, which may be requested at any time
            for learner in self._learners.values():
                learner.state.offload()
            self._frozen_memory.free(self._frozen, ())
            self._offloaded = True

    def onload(self) -> None:
        if self._offloaded:
            for learner in self._learners.values():
                learner.state.onload()
            self._frozen_memory.restore()
            self._offloaded = False

    def health(self) -> dict[str, Any]:
        return {"engine": "megatron", **super().health()}

    def _compute_digest(self) -> str:
        parts = [learner.state.fingerprints() for learner in self._learners.values()]
        if self._reference is not None:
            parts.append(self._reference.fingerprints())
        entries = [entry for part, _ in parts for entry in part]
        return digest(entries, torch.cat([sums for _, sums in parts]), f"weight_version {self._version}")

    def _update_reference(self) -> None:
        if self._reference is not None:
            self._reference.copy_from(self._actor.state)

    def _plan(self, lengths: dict[int, int]) -> list[MicroBatch]:
        """Return this rank's micro-batches, as many as every other rank's and, in a pipeline, a multiple of its
        stages."""
        training = self._training
        limit = training.max_tokens_per_gpu
        if limit is not None:
            limit *= training.context_parallel_size
        padded = {sample: padded_length(length, self._actor.alignment) for sample, length in lengths.items()}
        plan = pack_micro_batches(
            padded,
            limit,
            training.data_parallel_size,
            training.pipeline_model_parallel_size,
            most_samples=training.micro_batch_size,
        )
        return plan[parallel_state.get_data_parallel_rank()]
