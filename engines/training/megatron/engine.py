"""Production training engine: megatron-core, with every parallelism it has."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.processes.fingerprint import MEGATRON
from cairn.engines.training.batching import MicroBatch, pack_micro_batches
from cairn.engines.training.checkpoint import Described, Holds
from cairn.engines.training.collate import Tokens
from cairn.engines.training.exactly_once import ExactlyOnceEngine
from cairn.engines.training.losses.objective import Metrics, objective
from cairn.engines.training.losses.value import value_objective
from cairn.engines.training.megatron import checkpoint
from cairn.engines.training.megatron.backend import backend_for
from cairn.engines.training.megatron.folder import FILE_BYTES, write_model_folder
from cairn.engines.training.megatron.gathering import Receivers
from cairn.engines.training.megatron.learner import MegatronLearner, Reference
from cairn.engines.training.megatron.model import join_groups, load_model, read_values
from cairn.engines.training.megatron.passes import Passes
from cairn.engines.training.megatron.state import Memory
from cairn.engines.training.needs import has_critic, teacher_top_k, untrained_models
from cairn.engines.training.packing import padded_length
from cairn.engines.training.parts import NamedParts
from cairn.engines.training.process import join_process_group, prepare_process
from cairn.engines.training.sharding import raising_together
from cairn.engines.training.top_k import row_shape
from cairn.engines.training.vocabulary import Part, Softmax, read_log_probs
from cairn.engines.weights.buckets import Bucket
from cairn.engines.weights.fingerprint import digest
from cairn.storage.store.store import Store


class Policy:
    """Loss and log-probs of the policy, where each tensor-parallel rank has the logits of a part of the vocabulary."""

    def __init__(self, vocabulary: int, temperature: float) -> None:
        self._vocabulary, self._temperature = vocabulary, temperature

    def objective(
        self, outputs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig
    ) -> tuple[torch.Tensor, Metrics]:
        """Return the same as `cairn.engines.training.losses.objective.objective`."""
        return objective(outputs, tokens, algorithm, self._temperature, self._part(outputs), tokens.positions)

    def read(self, outputs: torch.Tensor, tokens: Tokens, top_k: int = 0) -> torch.Tensor:
        """Return the same as `cairn.engines.training.vocabulary.read_log_probs`."""
        softmax = Softmax(self._temperature, tokens.kept, tokens.positions, self._part(outputs))
        return read_log_probs(outputs, tokens.targets, softmax, top_k)

    def _part(self, outputs: torch.Tensor) -> Part:
        group = parallel_state.get_tensor_model_parallel_group()
        return Part(
            first=dist.get_rank(group) * outputs.shape[-1],
            size=self._vocabulary,
            group=group if dist.get_world_size(group) > 1 else None,
        )


def objective_of_values(outputs: torch.Tensor, tokens: Tokens, value_clip: float) -> tuple[torch.Tensor, Metrics]:
    """Return the same as `cairn.engines.training.losses.value.value_objective`, from the values of all tokens."""
    return value_objective(outputs.index_select(0, tokens.positions), tokens, value_clip)


class MegatronEngine(ExactlyOnceEngine):
    """A `TrainingEngine` (see cairn.engines.training.base for the contract of every method).

    Import this only where `cairn.engines.training.megatron.backend.backend_for` has prepared megatron-core, as
    `cairn.engines.training.factory` does. Master weights and optimizer state are float32. A process holds one engine at
    a time: Megatron's process groups are global.
    """

    _packages = MEGATRON
    _description = checkpoint.STATE
    _older: ClassVar = {checkpoint.FORMAT: checkpoint.MegatronState}

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
            value = partial(objective_of_values, value_clip=algorithm.value_clip)
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

    def export_weights(self, bucket_bytes: int, *, on_device: bool = False, in_turn: bool = False) -> Iterator[Bucket]:
        self._require_intact()
        to = Receivers.IN_TURN if in_turn else Receivers.FIRST
        for bucket in self._actor.state.gather_weights(self._dtype, bucket_bytes, to):
            yield bucket if on_device else bucket.on_host()

    def export_on_device(self, bucket_bytes: int) -> Iterator[Bucket]:
        self._require_intact()
        yield from self._actor.state.gather_weights(self._dtype, bucket_bytes, Receivers.ALL)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        self._require_ready()
        return self._actor.state.weights_checksum([self._dtype, getattr(torch, dtype)])

    def export_hf(self, folder: Path) -> None:
        self._require_intact()
        weights = chain.from_iterable(bucket.items() for bucket in self.export_weights(FILE_BYTES))
        write_model_folder(self._folder, weights, folder, dtype=self._dtype, write=self._rank == 0)

    def offload(self) -> None:
        self._require_intact()
        if not self._offloaded:
            self.state_digest()  # part of the position, which may be requested at any time
            self._end_copying()
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

    def _parts(self, *, owned: bool) -> NamedParts:
        for learner in self._learners.values():
            yield from learner.state.parts(owned=owned)
        if self._reference is not None:
            yield from self._reference.parts(owned=owned)

    def _has(self) -> Holds:
        return Holds(None, self._actor.state.frozen, "critic" in self._learners, self._reference is not None)

    def _load_older(self, store: Store, folder: str, state: Described) -> None:
        assert isinstance(state, checkpoint.MegatronState)
        with raising_together(self._world_size, self._device):
            checkpoint.check_state(folder, state, self._learners, self._reference)
        self._interrupted = "load"
        checkpoint.load(store, folder, state, self._learners, self._reference, self._device)

    def _filled(self) -> None:
        for learner in self._learners.values():
            learner.state.filled()

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
            limit *= training.ranks_of_sequence
        padded = {sample: padded_length(length, self._actor.alignment) for sample, length in lengths.items()}
        plan = pack_micro_batches(
            padded,
            limit,
            training.data_parallel_size,
            training.pipeline_model_parallel_size,
            most_samples=training.micro_batch_size,
        )
        return plan[parallel_state.get_data_parallel_rank()]
