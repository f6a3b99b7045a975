"""Memory of the ranks that train."""

from collections import Counter
from dataclasses import dataclass

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.activations import bytes_of, output_bytes, stage_activations
from cairn.engines.plan.ranks import Held, adapter_size, held_by_stage, is_trained, sharded, stages
from cairn.engines.plan.tensors import Model
from cairn.engines.training.exactly_once import untrained_models
from cairn.engines.training.needs import has_critic
from cairn.flows.plan.records import Row
from cairn.flows.plan.subject import Subject, planned_model


@dataclass(frozen=True)
class MicroBatches:
    """Of an optimizer step, on a rank."""

    tokens: int
    """Of the fullest, as far as this rank has them."""
    count: int


@dataclass(frozen=True)
class RankMemory:
    """Of one rank."""

    stage: int
    """Of its pipeline."""
    state: tuple[Row, ...]
    """From one step to the next."""
    step: tuple[Row, ...]
    """While it trains."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.state, *self.step)

    @property
    def total(self) -> float:
        return sum(row.bytes for row in self.rows)


def micro_batches(subject: Subject) -> MicroBatches:
    """As the engine cuts a step's samples, if all are of mean length but for those of the fullest, which are of the
    longest. A step whose length nothing bounds is one micro-batch, in a pipeline one for each stage."""
    config, lengths = subject.config, subject.lengths
    training, stages = config.training, config.training.pipeline_model_parallel_size
    context = training.context_parallel_size
    samples = max(1, config.global_batch_size // training.data_parallel_size)
    whole = samples * lengths.longest
    if training.micro_batch_size is not None:
        size = min(training.micro_batch_size, samples)
        tokens, count = size * lengths.longest, -(-samples // size)
    elif training.max_tokens_per_gpu is not None:
        limit = training.max_tokens_per_gpu * context
        tokens = min(whole, max(limit, lengths.longest))
        count = -int(-samples * lengths.mean // limit)
    else:
        tokens, count = max(whole // stages, lengths.longest), stages
    count = -(-max(1, count) // stages) * stages
    return MicroBatches(-(-tokens // context), count)


def heaviest_rank(subject: Subject) -> RankMemory:
    """Of the pipeline stage that needs most: the first keeps most micro-batches and has the embedding, the last has the
    output layer."""
    training = subject.config.training
    found = [rank_memory(subject, stage) for stage in range(training.pipeline_model_parallel_size)]
    return max(found, key=lambda rank: rank.total)


def rank_memory(subject: Subject, stage: int) -> RankMemory:
    """Of a rank of a pipeline stage."""
    config, training = subject.config, subject.config.training
    state = list(_learner_rows(subject.model, training, stage, ""))
    if has_critic(config.algorithm):
        critic, _ = planned_model(config.model.critic_path or config.model.path)
        rows = _learner_rows(critic, training, stage, "critic's ", critic=True)
        state.append(Row(what="critic, with its gradients and optimizer", bytes=sum(row.bytes for row in rows)))
    for role, path in untrained_models(config.model, config.algorithm).items():
        if role == "ref" and training.lora.r and config.model.ref_path is None:
            continue  # the model without its adapters
        frozen, _ = planned_model(path)
        held = _held(frozen, training, stage, trained=False)
        name = {"ref": "reference model", "teacher": "teacher"}[role]
        state.append(Row(what=name, bytes=held.all * bytes_of(training.dtype)))
    return RankMemory(stage, tuple(state), tuple(_step_rows(subject, stage)))


def _held(model: Model, training: TrainingConfig, stage: int, *, trained: bool = True, critic: bool = False) -> Held:
    if training.engine == "torch":
        return sharded(model, training, trained=trained, critic=critic)
    return held_by_stage(model, training, trained=trained, critic=critic)[stage]


def _learner_rows(model: Model, training: TrainingConfig, stage: int, whose: str, *, critic: bool = False) -> list[Row]:
    """Weights, gradients and optimizer. Gradients and moments are float32 on both engines. Megatron holds weights in
    the number format of training, and in bfloat16 a float32 copy with its optimizer, 6 + 12 bytes a parameter, of which
    the distributed optimizer divides the 12 by the ranks that hold the same (Megatron-LM's
    `theoretical_memory_usage.py`); torch holds float32 weights, 4 + 4 + 8. With LoRA all but adapters is in the number
    format of training."""
    held, size = _held(model, training, stage, critic=critic), bytes_of(training.dtype)
    if training.lora.r and not critic:
        adapters = adapter_size(model, training.lora) / training.world_size
        return [
            Row(what="weights", bytes=held.all * size + 4 * adapters),
            Row(what="gradients of adapters", bytes=4 * adapters),
            Row(what="optimizer of adapters", bytes=8 * adapters),
        ]
    if training.engine == "torch":
        weights, optimizer = 4 * held.all, 8 * held.trained
    else:
        weights, each = size * held.all, 8 + (4 if size == 2 else 0)
        dense, expert = replicas(training)
        optimizer = each * (held.trained_dense / dense + held.trained_expert / expert)
    return [
        Row(what=f"{whose}weights", bytes=weights),
        Row(what=f"{whose}gradients", bytes=4 * held.trained),
        Row(what=f"{whose}optimizer", bytes=optimizer),
    ]


def replicas(training: TrainingConfig) -> tuple[int, int]:
    """Ranks that share the optimizer's state of what they hold alike: of all but experts, and of experts."""
    options = training.megatron
    if not options.get("use_distributed_optimizer"):
        return 1, 1
    tensor, stages = training.tensor_model_parallel_size, training.pipeline_model_parallel_size
    experts = (options.get("expert_model_parallel_size") or 1) * (options.get("expert_tensor_parallel_size") or tensor)
    return training.world_size // (tensor * stages), training.world_size // (experts * stages)


def _step_rows(subject: Subject, stage: int) -> list[Row]:
    model, training, lengths = subject.model, subject.config.training, subject.lengths
    of_step = micro_batches(subject)
    last = training.pipeline_model_parallel_size - 1
    if training.engine == "torch":
        layers = range(model.config.num_hidden_layers)
    else:
        layers = stages(model.config.num_hidden_layers, training)[stage]
    kept = stage_activations(model, training, layers, stage, of_step.tokens, of_step.count, lengths.longest)
    shards = training.engine == "torch" and (training.world_size > 1 or training.dtype != "float32")
    at_output, in_layers = [], []
    if stage == last:
        trained = int(of_step.tokens * lengths.trained)
        logits = output_bytes(model, training, of_step.tokens, trained, critic=False)
        at_output.append(Row(what="logits and the output layer's input", bytes=logits))
    if kept.again:
        in_layers.append(Row(what="activations of the layers that are recomputed", bytes=kept.again))
    if shards:
        outside, layer = _gathered(model, training)
        at_output.append(Row(what="weights gathered from all ranks", bytes=outside))
        in_layers.append(Row(what="weights and gradients of layers gathered from all ranks", bytes=outside + layer))
    # Logits are gone when the backward pass has come to the layers.
    largest = max(at_output, in_layers, key=lambda rows: sum(row.bytes for row in rows))
    return [Row(what="activations", bytes=kept.kept), *largest]


def _gathered(model: Model, training: TrainingConfig) -> tuple[float, float]:
    """Bytes that FSDP2 gathers: of what is outside the layers, in the number format of training; and of a layer and the
    next one, with the gradient of one in it and in float32."""
    size, wanted = bytes_of(training.dtype), is_trained(training)
    layers: Counter[int] = Counter()
    gradients: Counter[int] = Counter()
    outside = 0
    for tensor in model.tensors:
        if tensor.layer is None:
            outside += tensor.size
        else:
            layers[tensor.layer] += tensor.size
            gradients[tensor.layer] += tensor.size * (wanted(tensor) and not training.lora.r)
    return size * outside, size * 2 * max(layers.values()) + (size + 4) * max(gradients.values())
