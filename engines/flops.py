"""Model FLOPs of an update, as model FLOPs utilization (MFU) counts them: Chowdhery et al., PaLM, 2022, appendix B.

A token of a sequence of T tokens takes 6 N + 12 L H Q T floating-point operations, forward and backward: N parameters
in matrix products, L layers of H heads of size Q. In a layer whose attention is a sliding window it is the window's
length where that is shorter than T, and with latent attention Q is the mean of a key's size and a value's. A gated
delta network looks at no tokens: it reads its state twice and writes it once, as if it were 3 H K V parameters, K and V
the sizes of its keys and values.

Of experts those that a token goes through count, and a table that embeddings are looked up in does not, nor what lies
in the folder and is not trained: layers that predict several tokens ahead, and an image tower. What is recomputed does
not count, nor what LoRA spares: it is the work of the model, not of the machine.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from cairn.engines.models import check_model_folder, open_weights, parameter_names


@dataclass(frozen=True)
class ModelSize:
    """What the FLOPs of a model follow from."""

    parameters: float
    """N."""
    attention: float
    """L · H · Q of the layers that look at all tokens."""
    windowed: float = 0
    """L · H · Q of those with a sliding window."""
    window: int = 0
    """Its tokens."""

    def training_flops(self, lengths: Sequence[int]) -> float:
        """Of one update on sequences of these lengths, in tokens."""
        seen = self.attention * sum(length**2 for length in lengths)
        seen += self.windowed * sum(length * min(length, self.window) for length in lengths)
        return 6 * self.parameters * sum(lengths) + 12 * seen


@cache
def model_size(path: str) -> ModelSize:
    """Of the model in a folder, read from the headers of its weight files. Raises BadModel."""
    config, names = check_model_folder(path).get_text_config(), parameter_names(path)
    weights = open_weights(Path(path)).items()
    return size_of(config, {name: weight.get_shape() for name, weight in weights if name in names})


def size_of(config: PretrainedConfig, shapes: Mapping[str, Sequence[int]]) -> ModelSize:
    """Of a model with this config.

    Args:
        shapes: of its parameters, tied ones once.
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
    sliding = layers.count("sliding_attention")
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
