"""Training engine for any Hugging Face causal LM: PyTorch, with FSDP2 over more than one rank."""

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.published import biases_of
from cairn.engines.models.routing import RouteReplay
from cairn.engines.training.batching import MicroBatch, pack_micro_batches, plan_micro_batches
from cairn.engines.training.checkpoint import (
    FILE_BYTES,
    FORMAT,
    REFERENCE,
    STATE,
    Described,
    Holds,
    NamedTensors,
    TrainingState,
    check_reference,
    check_trained,
    frozen_in,
    in_buckets,
    read_state,
)
from cairn.engines.training.exactly_once import ExactlyOnceEngine
from cairn.engines.training.freezing import freeze
from cairn.engines.training.losses.objective import objective
from cairn.engines.training.losses.value import value_objective
from cairn.engines.training.needs import has_critic, teacher_top_k, untrained_models
from cairn.engines.training.parts import NamedParts
from cairn.engines.training.process import join_process_group, prepare_process
from cairn.engines.training.regions import Region
from cairn.engines.training.sharding import (
    copy_part,
    local_part,
    raising_together,
    shard_model,
    state_digest,
    whole,
)
from cairn.engines.training.top_k import row_shape
from cairn.engines.training.torch.attention import use_packed_attention
from cairn.engines.training.torch.export import parts_of, save_model_folder, weights_checksum, whole_weights
from cairn.engines.training.torch.learner import TorchLearner, offload, onload
from cairn.engines.training.torch.loading import fill, load_outline
from cairn.engines.training.torch.lora import adapters_off, add_adapters, save_adapters
from cairn.engines.training.torch.passes import (
    Layout,
    Reading,
    packed_row,
    padded_rows,
    read_policy,
    read_values,
    score_responses,
)
from cairn.engines.training.value_model import load_value_model
from cairn.engines.types.types import TrainBatch
from cairn.engines.weights.buckets import Bucket
from cairn.storage.store.store import Store


class TorchEngine(ExactlyOnceEngine):
    """A `TrainingEngine` (see cairn.engines.training.base for the contract of every method).

    Master weights and optimizer state are float32. In bfloat16, forward and backward run on bfloat16 copies of the
    weights, made by FSDP2's mixed precision. So log-probs are those of a rollout engine that holds bfloat16. The model
    stays in evaluation mode: dropout would make log-probs differ from the rollout's.
    """

    _description = STATE
    _older: ClassVar = {FORMAT: TrainingState}

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
        """Load the model and, where the algorithm needs them, the critic, the teacher and the reference.

        With LoRA the reference is the model without adapters, unless `ref_path` is set.

        Args:
            temperature: temperature of the rollout, which divides the logits.
            total_steps: optimizer steps of the whole run, over which the learning rate decays by default.
            world_size: number of ranks; with more than one, a process group of that size must exist.
        """
        super().__init__(training, algorithm, total_steps=total_steps, rank=rank, world_size=world_size, device=device)
        self._temperature, self._folder = temperature, Path(model.path)
        prepare_process(training, self._device)
        self._layout: Layout = padded_rows
        if training.packs_rows:
            self._layout = partial(packed_row, group=self._context_group())
        # Untrained weights need no more precision than the passes use.
        self._model = self._load_model(model.path, self._dtype if training.lora.r else torch.float32, training)
        replay = RouteReplay(self._model) if algorithm.use_rollout_routing_replay else None
        loss = partial(objective, algorithm=algorithm, temperature=temperature)
        actor = TorchLearner(self._model, loss, training, world_size, replay, self._layout)
        self._learners: dict[str, TorchLearner] = {"actor": actor}
        self._frozen: list[PreTrainedModel] = []
        self._reference: PreTrainedModel | None = None
        """Reference that takes the actor's weights at an interval and is therefore part of the state."""
        self._scorers = {"actor": partial(self._log_probs, self._model, replay=replay)}
        for role, path in untrained_models(model, algorithm).items():
            if role == "ref" and training.lora.r and model.ref_path is None:
                self._scorers[role] = self._log_probs_without_adapters
                continue
            frozen = self._load_model(path, self._dtype).requires_grad_(False)
            self._frozen.append(frozen)
            if role == "ref" and algorithm.ref_update_interval is not None:
                self._reference = frozen
            top_k = teacher_top_k(algorithm) if role == "teacher" else 0
            self._scorers[role] = partial(self._log_probs, frozen, top_k=top_k)
        if has_critic(algorithm):
            path = model.critic_path or model.path
            critic = self._placed(load_value_model(path, torch.float32, self._load), path)
            loss = partial(value_objective, value_clip=algorithm.value_clip)
            self._learners["critic"] = TorchLearner(critic, loss, training.of_critic, world_size, layout=self._layout)
            self._scorers["critic"] = partial(self._responses, critic, read_values)

    def export_weights(self, bucket_bytes: int, *, on_device: bool = False, in_turn: bool = False) -> Iterator[Bucket]:
        self._require_intact()
        for number, bucket in enumerate(self._buckets(bucket_bytes, everywhere=in_turn)):
            if self._rank == (number % self._world_size if in_turn else 0):
                yield bucket.on(self._device) if on_device else bucket.on_host()

    def export_on_device(self, bucket_bytes: int) -> Iterator[Bucket]:
        self._require_intact()
        yield from self._buckets(bucket_bytes, everywhere=True)

    def weights_checksum(self, dtype: Literal["float32", "bfloat16"] = "float32") -> str:
        self._require_ready()
        dtypes = [self._dtype, getattr(torch, dtype)]
        return weights_checksum(self._model, self._device, dtypes, self._world_size)

    def export_hf(self, folder: Path) -> None:
        self._require_intact()
        exported = whole_weights(self._model, self._device, self._dtype, FILE_BYTES)
        weights = {name: weight.cpu() for name, weight in exported}
        if self._rank == 0:
            save_model_folder(self._model, weights, folder, self._folder)
        if self._training.lora.r:
            parameters = self._learners["actor"].state()["parameters"]
            adapters = {name: whole(tensor.to(self._device)).cpu() for name, tensor in parameters}
            if self._rank == 0:
                save_adapters(self._model, adapters, folder / "adapter")

    def offload(self) -> None:
        self._require_intact()
        if not self._offloaded:
            self.state_digest()  # part of the position, which may be requested at any time
            self._end_copying()
            offload(self._models(), self._optimizers())
            self._offloaded = True

    def onload(self) -> None:
        if self._offloaded:
            on_host = self._training.fsdp_cpu_offload
            onload(self._models(), self._optimizers(), self._device, keep_shards=on_host)
            self._offloaded = False

    def health(self) -> dict[str, Any]:
        return {"engine": "torch", **super().health()}

    def _compute_digest(self) -> str:
        named_tensors = [
            (f"{kind}.{name}", tensor) for kind, tensors in self._state().items() for name, tensor in tensors
        ]
        return state_digest(named_tensors, self._version, self._world_size)

    def _parts(self, *, owned: bool) -> NamedParts:
        for kind, tensors in self._state().items():
            for name, tensor in tensors:
                local, offset = local_part(tensor)
                if owned and self._rank and not isinstance(tensor, DTensor):
                    continue  # the first rank writes what all have whole
                columns = max(1, tensor.numel() // max(1, tensor.shape[0] if tensor.dim() else 1))
                rows = offset // columns, local.numel() // columns
                yield Region.rows(f"{kind}.{name}", tuple(tensor.shape), *rows), local.detach().view(-1)

    def _has(self) -> Holds:
        actor = self._learners["actor"]
        return Holds(actor.names, actor.frozen, "critic" in self._learners, self._reference is not None)

    def _load_older(self, store: Store, folder: str, state: Described) -> None:
        assert isinstance(state, TrainingState)
        with raising_together(self._world_size, self._device):
            check_reference(folder, REFERENCE in {file.kind for file in state.files}, self._reference is not None)
            actor = self._learners["actor"]
            check_trained(folder, (frozen_in(state) ^ actor.frozen) & actor.names)
            self._interrupted = "load"
            with torch.no_grad():
                read_state(store, folder, state, self._state())

    def _models(self) -> list[PreTrainedModel]:
        return [*(learner.model for learner in self._learners.values()), *self._frozen]

    def _optimizers(self) -> list[torch.optim.AdamW]:
        return [learner.optimizer for learner in self._learners.values()]

    def _log_probs(
        self,
        model: PreTrainedModel,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        replay: RouteReplay | None = None,
        top_k: int = 0,
    ) -> torch.Tensor:
        reading = partial(read_policy, temperature=self._temperature, top_k=top_k)
        return self._responses(model, reading, batch, micro_batches, replay, row_shape(top_k))

    def _responses(
        self,
        model: PreTrainedModel,
        reading: Reading,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        replay: RouteReplay | None = None,
        shape: tuple[int, ...] = (),
    ) -> torch.Tensor:
        scores = score_responses(model, batch, micro_batches, reading, replay, shape, self._layout)
        if self._world_size > 1:
            dist.all_reduce(scores)  # one value and zeros: exact
        return scores

    def _log_probs_without_adapters(self, batch: TrainBatch, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        with adapters_off(self._model):
            return self._log_probs(self._model, batch, micro_batches)

    def _load_model(self, path: str, parameters: torch.dtype, trained: TrainingConfig | None = None) -> PreTrainedModel:
        """Load a model that computes in the training's number format and holds its parameters in `parameters`.

        `trained`: the training configuration, for the actor only. Parameters must be frozen before ranks shard them.
        """
        if trained is not None and trained.lora.r:
            model = load_causal_lm(path, parameters)  # adapters are made beside weights that have values
            add_adapters(model, trained.lora)
        else:
            model = self._load(path, parameters)
            if trained is not None:
                freeze(model, trained)
        return self._placed(model, path)

    @property
    def _load(self) -> Callable[..., PreTrainedModel]:
        """The function that loads a model: whole for one rank, otherwise without values until it is sharded."""
        return load_causal_lm if self._world_size == 1 else load_outline

    def _context_group(self) -> dist.ProcessGroup | None:
        """Return this rank's group of consecutive ranks that share each row; None where a rank has whole rows."""
        size = self._training.ranks_of_sequence
        if size == 1:
            return None
        join_process_group(self._world_size)
        minutes = self._training.distributed_timeout_minutes
        return dist.new_subgroups(size, timeout=timedelta(minutes=minutes))[0]

    def _placed(self, model: PreTrainedModel, path: str) -> PreTrainedModel:
        if self._training.packs_rows:
            use_packed_attention(model)
        on_host = self._training.fsdp_cpu_offload
        formats = {parameter.dtype for parameter in model.parameters()}
        if self._world_size == 1 and formats == {self._dtype} and not on_host:
            return cast(Any, model).to(self._device)
        shard_model(model, self._dtype, self._world_size, self._device, on_host=on_host)
        fill(model, path, torch.device("cpu") if on_host else self._device)
        return model

    def _plan(self, lengths: dict[int, int]) -> list[MicroBatch]:
        training = self._training
        limit, most = training.max_tokens_per_gpu, training.micro_batch_size
        if not training.packs_rows:
            return plan_micro_batches(lengths, limit, self._world_size, most_samples=most)[self._rank]
        size = training.ranks_of_sequence
        limit = None if limit is None else limit * size
        return pack_micro_batches(lengths, limit, self._world_size // size, most_samples=most)[self._rank // size]

    def _state(self) -> dict[str, NamedTensors]:
        """Return every tensor of the state, by its kind; the critic's names begin with `critic.`."""
        kinds: dict[str, NamedTensors] = {}
        for role, learner in self._learners.items():
            prefix = "" if role == "actor" else f"{role}."
            for kind, tensors in learner.state().items():
                kinds.setdefault(kind, []).extend((prefix + name, tensor) for name, tensor in tensors)
        if self._reference is not None:
            kinds[REFERENCE] = [(name, value.detach()) for name, value in self._weights_of(self._reference)]
        return kinds

    @torch.no_grad()
    def _update_reference(self) -> None:
        if self._reference is None:
            return
        actor = dict(self._weights_of(self._model))
        for name, value in self._weights_of(self._reference):
            copy_part(value, whole(actor[name].detach()))

    def _weights_of(self, model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights that steps may change: the parameters, and the routers' biases where they are updated."""
        moved = biases_of(model) if self._training.moe_router_bias_update_rate else iter(())
        return chain(model.named_parameters(), moved)

    def _buckets(self, bucket_bytes: int, *, everywhere: bool) -> Iterator[Bucket]:
        """Yield buckets of published weights on the device, gathered from all ranks: on rank 0, or on every rank."""
        parts = parts_of(self._model)
        exported = whole_weights(self._model, self._device, self._dtype, bucket_bytes, everywhere=everywhere)
        published = ((part.name, part.of(full)) for name, full in exported for part in parts[name])
        return map(Bucket, in_buckets(published, bucket_bytes))
