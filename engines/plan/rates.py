"""Duration of a step in seconds, from its computation and data transfers and from a machine's rates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from cairn.configs.catalogue import Hardware
from cairn.engines.models.configs import Config
from cairn.engines.plan.serving import Serving, served_parameters
from cairn.engines.plan.tensors import Model, Part

# Model FLOPs of an update, as model FLOPs utilization (MFU) counts them: Chowdhery et al., PaLM, 2022, appendix B.
#
# A token of a sequence of T tokens takes 6 N + 12 L H Q T floating-point operations, forward and backward: N parameters
# in matrix products, L layers of H heads of size Q. For a layer with sliding-window attention, T is the window's length
# where that is shorter; for latent attention, Q is the mean of a key's size and a value's. A gated delta network
# attends to no tokens: it reads its state twice and writes it once, which counts as 3 H K V parameters, with K and V
# the sizes of its keys and values.
#
# Of the experts, only those that a token is routed to count. Embedding tables do not count, and neither do untrained
# parts of the folder: layers that predict several tokens ahead, and an image tower. Recomputation and LoRA change
# nothing: the count is the work of the model, not of the machine.


@dataclass(frozen=True)
class ModelSize:
    """Quantities that determine the FLOPs of a model."""

    parameters: float
    """N: parameters in matrix products, of experts those that a token is routed to."""
    attention: float
    """L · H · Q of the layers that attend to all tokens."""
    windowed: float = 0
    """L · H · Q of the layers with a sliding window."""
    window: int = 0
    """Tokens of the sliding window."""

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Return the FLOPs of one update on sequences of these lengths, in tokens."""
        seen = self.attention * sum(length**2 for length in lengths)
        seen += self.windowed * sum(length * min(length, self.window) for length in lengths)
        return 6 * self.parameters * sum(lengths) + 12 * seen


def size_of(config: Config, shapes: Mapping[str, Sequence[int]]) -> ModelSize:
    """Return the size of a model with this config.

    Args:
        shapes: shapes of its parameters; tied parameters count once.
    """
    experts = next(
        (n for name in ("num_experts", "num_local_experts", "n_routed_experts") if (n := getattr(config, name, None))),
        1,
    )
    active = (getattr(config, "num_experts_per_tok", None) or experts) / experts
    tables = ("bias", "embed_tokens.weight") if "lm_head.weight" in shapes else ("bias",)
    parameters = 0.0
    for name, shape in shapes.items():
        if not re.search(r"\bvisual\.", name) and len(shape) > 1 and not name.endswith(tables):
            parameters += prod(shape) * (active if ".experts." in name else 1)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    usual = "sliding_attention" if window else "full_attention"
    layers = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    if (linear := layers.count("linear_attention")) > 0:
        state = config.linear_key_head_dim * config.linear_value_head_dim
        parameters += linear * 3 * config.linear_num_value_heads * state
    # A layer of compressed attention has a window too. The few entries that it sees besides are left out.
    sliding = sum(kind == "sliding_attention" or "compressed" in kind for kind in layers)
    of_layer = config.num_attention_heads * _head_size(config)
    return ModelSize(
        parameters,
        (len(layers) - linear - sliding) * of_layer,
        sliding * of_layer,
        window or 0,
    )


def _head_size(config: Any) -> float:
    if getattr(config, "kv_lora_rank", None):
        return (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    return getattr(config, "head_dim", None) or config.hidden_size / config.num_attention_heads


# Memory of a sample during generation: keys and values, or what a layer stores in their place.


@dataclass(frozen=True)
class CacheNeed:
    """Cache memory of a sample on each rank, in bytes."""

    per_token: float
    """Bytes per token in layers that attend to all tokens."""
    windowed: float
    """Bytes per token in layers with a sliding window."""
    window: int
    """Tokens of the sliding window."""
    fixed: float
    """Bytes of the state of linear attention, independent of the length."""

    def of(self, tokens: float) -> float:
        """Return the bytes of a sample of this many tokens."""
        return self.per_token * tokens + self.windowed * min(tokens, self.window or tokens) + self.fixed


def cache_need(model: Model, size: int, ranks: int = 1) -> CacheNeed:
    """Return the cache memory that a sample takes on a rank; SGLang calls the part per token `cell_size`.

    A layer stores 2 × key-value heads × head size, and heads are divided over ranks until each rank has one. Latent
    attention stores the latent vector and the rotary key, and every rank stores both whole (DeepSeek-V2, 2024, section
    2.1). A gated delta network stores the last inputs of its convolution and a float32 matrix for each value head.

    Args:
        size: bytes of a number in the cache.
        ranks: tensor-parallel ranks of attention.
    """
    config = model.config
    if model.latent:
        token = float(config.kv_lora_rank + config.qk_rope_head_dim) * size
    else:
        token = max(1.0, model.kv_heads / ranks) * (model.key_size + model.value_size) * size
    kinds = [layer.attention for layer in model.layers]
    fixed = 0.0
    if linear := kinds.count("linear"):
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        values = config.linear_num_value_heads * config.linear_value_head_dim
        convolution = (config.linear_conv_kernel_dim - 1) * (2 * keys + values) * size
        fixed = linear * (convolution + 4 * values * config.linear_key_head_dim) / ranks
    sliding = kinds.count("sliding")
    return CacheNeed(token * (len(kinds) - linear - sliding), token * sliding, model.window, fixed)


def model_size(model: Model) -> ModelSize:
    """Return the quantities that determine the model's FLOPs."""
    return size_of(model.config, {tensor.name: tensor.shape for tensor in model.tensors})


def bubble(stages: int, micro_batches: int, parts: int = 1) -> float:
    """Return the idle time of a pipeline stage as a share of its work: (p - 1) / (v m) (Narayanan et al., "Efficient
    Large-Scale Language Model Training on GPU Clusters", 2021, section 2.2)."""
    return (stages - 1) / (parts * micro_batches)


@dataclass(frozen=True)
class Decoding:
    """Speed of a rollout engine."""

    model: Model
    serving: Serving
    weight_bytes: float
    """Bytes of a weight element."""
    cache_bytes: int
    """Bytes of a number in the cache."""
    hardware: Hardware
    flops: float
    """Peak floating-point operations per second of one of its GPUs."""

    def step(self, samples: float, context: float) -> float:
        """Return the seconds of one decoding step, in which each sample gets one token.

        Each GPU either reads the weights in use and the samples' cache, or computes, whichever takes longer (Pope et
        al., "Efficiently Scaling Transformer Inference", 2022, section 2). A batch of B tokens uses E (1 - (1 - k /
        E)^B) of a layer's E experts, if each token's k experts are drawn uniformly.

        Args:
            context: current tokens of each sample.
        """
        model, ranks = self.model, self.serving.tensor
        experts = sum(tensor.size for tensor in model.tensors if tensor.part is Part.EXPERT) / ranks
        touched = 1 - (1 - model.experts_per_token / model.experts) ** samples if experts else 0.0
        weights = served_parameters(model, self.serving) - experts * (1 - touched)
        need = cache_need(model, self.cache_bytes, self.serving.attention)
        read = weights * self.weight_bytes + samples / self.serving.data * need.of(context)
        computed = 2 * model.active_parameters * samples / ranks
        hardware = self.hardware
        return max(read / (hardware.hbm_gb_s * 1e9 * hardware.mbu), computed / (self.flops * hardware.mfu))

    def seconds(self, samples: float, at_once: float, prompt: float, response: float, longest: float) -> float:
        """Return the seconds to sample responses.

        The number of steps is that of the longest response, or that of all responses with `at_once` sampled
        concurrently, whichever is larger. The next sample starts as soon as one ends.

        Args:
            samples: samples of the engine.
            prompt: tokens of a prompt.
            response: tokens of a response, on average.
            longest: tokens of the longest response.
        """
        steps = max(longest, samples * response / max(1.0, at_once))
        batch = samples * response / steps
        return steps * self.step(batch, prompt + response / 2)

    def prefill(self, tokens: float) -> float:
        """Return the seconds to prefill prompts with this many tokens in total."""
        return 2 * self.model.active_parameters * tokens / (self.serving.tensor * self.flops * self.hardware.mfu)
