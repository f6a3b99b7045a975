"""Memory of a sample while it is generated: keys and values, or what a layer keeps in their place."""

from dataclasses import dataclass

from cairn.engines.plan.tensors import Model


@dataclass(frozen=True)
class CacheNeed:
    """Of a sample on each rank, in bytes."""

    per_token: float
    """Of layers that look at all tokens."""
    windowed: float
    """Of a token, of layers with a sliding window."""
    window: int
    """Tokens of it."""
    fixed: float
    """State of linear attention, whatever the length."""

    def of(self, tokens: float) -> float:
        """Of a sample of so many tokens."""
        return self.per_token * tokens + self.windowed * min(tokens, self.window or tokens) + self.fixed


def cache_need(model: Model, size: int, ranks: int = 1) -> CacheNeed:
    """What a rank keeps of a sample, in SGLang's words its `cell_size`: 2 × key-value heads × head size of each layer,
    where heads are dealt out to ranks until each has one; with latent attention the latent vector and the rotary key,
    which every rank keeps whole (DeepSeek-V2, 2024, section 2.1); of a gated delta network the last inputs of its
    convolution and a float32 matrix of each value head.

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
