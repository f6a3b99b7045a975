"""Memory of activations that the forward pass retains for the backward pass.

The count follows Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4:
the inputs of every matrix product, and what the operations between them retain. Its equation 1, for a layer of GPT with
dropout and retained attention scores, is s b h (34 + 5 a s / h) bytes. The layers here have no dropout, and scores are
not retained, because flash attention kernels do what the paper's selective recomputation does (equation 6). But they
have gated feed-forward parts, fewer key-value heads, query and key norms, latent attention and experts. So the terms
are added up one by one.

Ranks share this memory: tensor parallelism divides the activations inside attention and the feed-forward part (equation
2), sequence parallelism also divides the rest (equation 4), and context parallelism divides the tokens. A pipeline's
first stage retains as many micro-batches as there are stages (section 4.2.3), the other stages fewer.
"""

from dataclasses import dataclass

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.plan.tensors import Layer, Model
from cairn.engines.training.chunks import chunk_logits


@dataclass(frozen=True)
class Kernels:
    """Tensors that operations retain besides the inputs of matrix products."""

    norm_float32: int
    """Float32 tensors of a norm's size."""
    norm: int
    """Tensors of a norm's size in the number format of training."""
    gate: int
    """Tensors of the width of a gated feed-forward part, between its two matrix products."""
    weighted: int
    """Further such tensors of an expert, whose output is multiplied by the router's weight."""
    rotary: int
    """Tensors of a head's size that each layer retains for rotary embeddings."""
    outputs: int
    """Copies of attention's output: its own, and the next product's input."""
    mixed: bool
    """Whether a key norm retains the whole output of a fused projection to queries, keys and values."""
    scores: bool = False
    """Whether attention scores are retained where key and value sizes differ."""


TORCH_CPU = Kernels(norm_float32=1, norm=1, gate=3, weighted=0, rotary=0, outputs=1, mixed=False, scores=True)
"""The library's modules with PyTorch's own operations, on a CPU."""
TORCH = Kernels(norm_float32=1, norm=1, gate=3, weighted=0, rotary=0, outputs=1, mixed=False)
"""The library's modules on a GPU, where other attention kernels support key and value sizes that differ."""
MEGATRON_CPU = Kernels(norm_float32=2, norm=0, gate=4, weighted=1, rotary=4, outputs=2, mixed=True, scores=True)
"""`cairn.engines.training.megatron.cpu`."""
MEGATRON = Kernels(norm_float32=0, norm=1, gate=4, weighted=1, rotary=0, outputs=1, mixed=True)
"""Transformer Engine's norms and attention, and Megatron's own gate."""
MEGATRON_FUSED = Kernels(norm_float32=0, norm=1, gate=2, weighted=0, rotary=0, outputs=1, mixed=True)
"""`MEGATRON` with `bias_activation_fusion`, the default on GPUs."""


def kernels_of(training: TrainingConfig) -> Kernels:
    """Return the kernels that the training engine uses."""
    on_gpu = training.num_gpus_per_rank > 0
    if training.engine == "torch":
        return TORCH if on_gpu else TORCH_CPU
    if not on_gpu:
        return MEGATRON_CPU
    fused = training.megatron.get("bias_activation_fusion", not training.megatron.get("use_te_activation_func"))
    return MEGATRON_FUSED if fused else MEGATRON


def bytes_of(dtype: str) -> int:
    """Return the bytes of a number."""
    return {"float32": 4, "bfloat16": 2}[dtype]


def layer_bytes(model: Model, layer: Layer, training: TrainingConfig, longest: int) -> float:
    """Return the bytes that a layer retains for each token on a rank, without recomputation.

    Args:
        longest: tokens of the longest sequence, for kernels that retain scores.
    """
    kernels, size = kernels_of(training), bytes_of(training.dtype)
    tensor = training.tensor_model_parallel_size
    around = tensor if training.megatron.get("sequence_parallel") else 1
    hidden = model.config.hidden_size
    norm = 4 * kernels.norm_float32 + size * kernels.norm
    outside = layer.norms * (hidden * norm + 4)  # each with a float32 scale of the token
    outside += hidden * size * (1 + (layer.width > 0 or layer.expert_width > 0))  # inputs of the next products
    whole = size * kernels.rotary * model.key_size * (layer.attention != "linear")
    inside = _attention(model, layer, kernels, size, norm, longest)
    inside += layer.width * size * (kernels.gate + 1)
    if layer.expert_width:
        chosen, cut = model.experts_per_token, training.megatron.get("expert_tensor_parallel_size") or tensor
        gate = max(6, kernels.gate) if _is_clamped(model) else kernels.gate
        routed = layer.expert_width * size * (gate + kernels.weighted + 1)
        inside += chosen * (hidden * size * cut + routed)
        if kernels in (TORCH, TORCH_CPU):  # the outputs of its experts are weighted, not their inputs
            inside += chosen * hidden * size
        inside += 12 * model.experts + 32 * chosen  # maps and weights of the router
    return outside / around + whole + inside / tensor


def _attention(model: Model, layer: Layer, kernels: Kernels, size: int, norm: int, longest: int) -> float:
    """Return the bytes that attention retains for each token, before division by ranks."""
    config = model.config
    if layer.attention == "linear":
        return _delta_net(model, size)
    eager = model.sinks and kernels is not MEGATRON and kernels is not MEGATRON_FUSED
    kv_heads = model.heads if model.latent or eager else model.kv_heads
    queries, keys, values = model.heads * model.key_size, kv_heads * model.key_size, kv_heads * model.value_size
    out = model.heads * model.value_size
    retained = size * (queries + keys + values + kernels.outputs * out)
    retained += 4 * model.heads  # log-sum-exp of the scores
    if model.latent:
        ranks = [rank for rank in (config.q_lora_rank, config.kv_lora_rank) if rank]
        retained += sum(rank * (norm + size) + 4 for rank in ranks)
    if eager or (model.latent and kernels.scores):
        retained += size * model.heads * (longest + eager)
    if normed := _norms_of_heads(model):
        mixed = queries + 2 * keys if kernels.mixed else 0
        if kernels is MEGATRON_CPU and size == 4:
            retained += 4 * (2 * queries + keys + mixed)
        elif kernels.mixed and not kernels.norm_float32:
            retained += size * (queries + mixed)
        else:
            retained += norm * (queries + keys)
        retained += 4 * normed
    if _is_gated(model):
        retained += 3 * size * out  # the gate, its sigmoid, and the product's input
    return retained


def _norms_of_heads(model: Model) -> int:
    """Return how many scales the query and key norms retain for a token; 0 where there are no such norms."""
    full = next((number for number, layer in enumerate(model.layers) if layer.attention != "linear"), 0)
    names = [tensor.name for tensor in model.tensors if tensor.layer == full]
    if not any(name.endswith("q_norm.weight") for name in names):
        return 0
    return model.heads + model.kv_heads


def _is_gated(model: Model) -> bool:
    """Whether the query projection also gives a gate of attention's output."""
    rows = next((one.shape[0] for one in model.tensors if one.name.endswith("self_attn.q_proj.weight")), 0)
    return rows == 2 * model.heads * model.key_size


def _is_clamped(model: Model) -> bool:
    """Whether experts clamp both inputs of their gate, each of which is retained."""
    return getattr(model.config, "swiglu_limit", None) is not None or model.sinks


def _delta_net(model: Model, size: int) -> float:
    """Estimate the bytes that a gated delta network retains for each token (Yang et al., "Gated Delta Networks", 2025).

    Counted are inputs and outputs of its convolution, queries and keys of every value head, values, gate, output and
    the gated norm. Not counted are states of chunks, which its kernels retain or recompute.
    """
    config = model.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    repeated = config.linear_num_value_heads * config.linear_key_head_dim
    return size * (2 * (2 * keys + values) + 2 * repeated + values + 4 * values) + 8 * config.linear_num_value_heads


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on a rank."""

    retained: float
    """Bytes of the layers, for all micro-batches in flight."""
    recomputed: float
    """Bytes of recomputed activations while they exist."""


def stage_activations(
    model: Model,
    training: TrainingConfig,
    layers: range,
    stage: int,
    tokens: int,
    micro_batches: int,
    longest: int,
) -> Activations:
    """Return the activations of a pipeline stage.

    Args:
        layers: layers of the stage.
        tokens: tokens of a micro-batch on this rank.
        micro_batches: micro-batches of an optimizer step on this rank.
        longest: tokens of the longest sequence.
    """
    size, options = bytes_of(training.dtype), training.megatron
    around = training.tensor_model_parallel_size if options.get("sequence_parallel") else 1
    entry = tokens * model.config.hidden_size * size / around
    kinds = dict.fromkeys(model.layers[layer] for layer in layers)
    of_kind = {kind: tokens * layer_bytes(model, kind, training, longest) for kind in kinds}
    each = [of_kind[model.layers[layer]] for layer in layers]
    under_way = micro_batches_in_flight(training, stage, micro_batches)
    granularity = "full" if training.gradient_checkpointing else options.get("recompute_granularity")
    if granularity != "full":  # selective recomputation covers only attention's scores, which are never retained
        return Activations(sum(each) * under_way, 0.0)
    if not training.gradient_checkpointing and options.get("recompute_method") == "block":
        recomputed = min(len(each), int(options.get("recompute_num_layers") or len(each)))
        retained = recomputed * entry + sum(each[recomputed:])
        return Activations(retained * under_way, max(each[:recomputed], default=0.0))
    together = 1 if training.gradient_checkpointing else int(options.get("recompute_num_layers") or 1)
    groups = [each[first : first + together] for first in range(0, len(each), together)]
    return Activations(len(groups) * entry * under_way, max(map(sum, groups), default=0.0))


def micro_batches_in_flight(training: TrainingConfig, stage: int, micro_batches: int) -> float:
    """Return the largest number of forward passes whose backward pass has not run yet.

    In a pipeline of p stages this is p - stage. With v virtual stages it is (2 (p - stage - 1) + (v - 1) p + 1) / v, in
    units of whole stages (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021,
    section 2.2, in Megatron's schedule).
    """
    count, parts = training.pipeline_model_parallel_size, training.megatron.get("virtual_pipeline_model_parallel_size")
    if parts is None or parts == 1:
        return min(micro_batches, count - stage)
    return min(micro_batches * parts, 2 * (count - stage - 1) + (parts - 1) * count + 1) / parts


def output_bytes(model: Model, training: TrainingConfig, tokens: int, trained_tokens: int, *, critic: bool) -> float:
    """Return the peak bytes of the output layer's part on the last stage: the layer's input, and logits.

    A logit exists once, in the number format of training, and its gradient takes its place. Beside it are two float32
    copies of one chunk (`cairn.engines.training.vocabulary`). Megatron computes logits of all tokens, the torch engine
    of the trained ones. Megatron then holds the gradient of the layer's weight in the number format of training, until
    it is added to the float32 gradients; chunks are freed by then.
    """
    size, hidden = bytes_of(training.dtype), model.config.hidden_size
    tensor = training.tensor_model_parallel_size
    around = tensor if training.megatron.get("sequence_parallel") else 1
    kernels = kernels_of(training)
    norm = tokens * (hidden * (4 * kernels.norm_float32 + size * kernels.norm) + 4) / around
    if critic:
        return norm + trained_tokens * hidden * size / around
    width = -(-model.config.vocab_size // tensor)
    chunk = 2 * 4 * min(trained_tokens * width, chunk_logits(on_gpu=training.num_gpus_per_rank > 0))
    if training.engine == "torch":
        return norm + trained_tokens * (hidden + width) * size + chunk
    weight = width * hidden * size
    return norm + tokens * (hidden / around + width) * size + max(chunk, weight)
