"""The tensors of a model from its config alone: the library makes the model without memory for its weights."""

import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from cairn.engines.models.folders import ARCHITECTURE_OF, KNOWN_TYPES, require_no_code, sees_images
from cairn.engines.types.errors import BadModel


class Part(Enum):
    """The way in which ranks share a tensor."""

    EMBEDDING = "embedding"
    """Input embedding: rows of the vocabulary, divided over tensor-parallel ranks, on the first pipeline stage."""
    HEAD = "head"
    """Output layer: rows of the vocabulary, divided over tensor-parallel ranks, on the last pipeline stage."""
    CUT = "cut"
    """In a layer: divided over tensor-parallel ranks."""
    WHOLE = "whole"
    """In a layer: whole on each tensor-parallel rank."""
    EXPERT = "expert"
    """Experts of a layer: distributed over expert-parallel ranks, each expert divided over expert-tensor-parallel
    ranks."""
    END = "end"
    """After the last layer: whole."""


_WHOLE_MATRIX = re.compile(r"\.(gate|router|shared_expert_gate|q_a_proj|kv_a_proj_with_mqa)\.weight$|\.indexer\.")
"""Routers, and the projections of latent attention into its latent spaces: every rank needs them whole."""
_CUT_VECTOR = re.compile(
    r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj|in_proj_\w+|q_b_proj|kv_b_proj)\.bias$|\.sinks$|\.(A_log|dt_bias)$"
)
"""Biases of layers whose outputs are divided, and vectors with one number per head."""


@dataclass(frozen=True)
class Tensor:
    """A parameter, with its name in the library."""

    name: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @cached_property
    def layer(self) -> int | None:
        """Number of the tensor's layer; None outside the layers."""
        match = re.search(r"\blayers\.(\d+)\.", self.name)
        return None if match is None else int(match[1])

    @cached_property
    def part(self) -> Part:
        if self.layer is None:
            if "embed_tokens" in self.name:
                return Part.EMBEDDING
            return Part.HEAD if self.name.startswith("lm_head") else Part.END
        if ".experts." in self.name:
            return Part.EXPERT
        if len(self.shape) < 2:
            return Part.CUT if _CUT_VECTOR.search(self.name) else Part.WHOLE
        return Part.WHOLE if _WHOLE_MATRIX.search(self.name) else Part.CUT


@dataclass(frozen=True)
class Layer:
    """Quantities that determine a layer's activations."""

    attention: str
    """`full`, `sliding` or `linear`."""
    norms: int
    """Norms over the hidden size."""
    width: int
    """Width of the feed-forward part that all tokens pass, shared experts included; 0 without one."""
    expert_width: int
    """Width of one expert; 0 without experts."""


@dataclass(frozen=True)
class Model:
    """A model as its config describes it."""

    config: PretrainedConfig
    """Config of the language model."""
    tensors: tuple[Tensor, ...]
    """Tensors of the model; tied tensors count once."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token passes.

        Of the experts only those that the token is routed to count, and the embedding counts whole.
        """
        return sum(
            tensor.size * self.experts_per_token // self.experts if tensor.part is Part.EXPERT else tensor.size
            for tensor in self.tensors
        )

    @property
    def experts(self) -> int:
        """Experts of a layer that has experts; 1 where no layer has any."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        return next((count for name in names if (count := getattr(self.config, name, None))), 1)

    @property
    def experts_per_token(self) -> int:
        return int(getattr(self.config, "num_experts_per_tok", None) or 1) if self.experts > 1 else 1

    @property
    def tied(self) -> bool:
        """Whether the output layer is tied to the embedding."""
        return not any(tensor.part is Part.HEAD for tensor in self.tensors)

    @property
    def latent(self) -> bool:
        """Whether keys and values are stored as latent vectors (multi-head latent attention)."""
        return bool(getattr(self.config, "kv_lora_rank", None))

    @cached_property
    def sinks(self) -> bool:
        """Whether heads have attention sinks: a learnt offset of the softmax, which few attention kernels support."""
        return any(tensor.name.endswith(".sinks") for tensor in self.tensors)

    @property
    def key_size(self) -> int:
        """Size of a head's key and query."""
        if self.latent:
            return int(self.config.qk_nope_head_dim + self.config.qk_rope_head_dim)
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.heads)

    @property
    def value_size(self) -> int:
        """Size of a head's value."""
        return int(self.config.v_head_dim) if self.latent else self.key_size

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    @property
    def window(self) -> int:
        """Tokens in the window of layers with sliding-window attention; 0 where no layer has one."""
        used = getattr(self.config, "use_sliding_window", True)
        return int(getattr(self.config, "sliding_window", None) or 0) if used else 0

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        usual = "sliding_attention" if self.window else "full_attention"
        kinds = getattr(self.config, "layer_types", None) or [usual] * self.config.num_hidden_layers
        hidden = self.config.hidden_size
        norms: Counter[int] = Counter()
        width: Counter[int] = Counter()
        expert: Counter[int] = Counter()
        for tensor in self.tensors:
            if tensor.layer is None:
                continue
            if tensor.part is Part.EXPERT:
                if tensor.name.endswith("down_proj"):
                    expert[tensor.layer] = tensor.size // (hidden * self.experts)
            elif re.search(r"\bmlp\.(shared_experts?\.)?down_proj\.weight$", tensor.name):
                width[tensor.layer] += tensor.size // hidden
            elif tensor.shape == (hidden,) and "norm" in tensor.name and ".self_attn." not in tensor.name:
                norms[tensor.layer] += 1
        return tuple(
            Layer(kind.removesuffix("_attention"), norms[number], width[number], expert[number])
            for number, kind in enumerate(kinds)
        )


def model_of(config: PretrainedConfig) -> Model:
    """Return the causal language model of a config, with its tensors.

    Raises BadModel where the library cannot make it, or where it has parts that the plan does not include.
    """
    if sees_images(config):
        raise BadModel(f"a {config.model_type} reads images, whose memory and time the plan does not include")
    text = config.get_text_config()
    if getattr(text, "compress_rates", None):
        raise BadModel(
            f"a {text.model_type} has hyper-connections and compressed attention, whose memory and time the plan does "
            "not include"
        )
    try:
        with torch.device("meta"):
            made: Any = AutoModelForCausalLM.from_config(text)
    except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise BadModel(f"no {text.model_type} model can be made of the config: {error}") from error
    return Model(text, tuple(Tensor(name, tuple(value.shape)) for name, value in made.named_parameters()))


def config_of(stored: dict[str, Any]) -> PretrainedConfig:
    """Return the contents of a config.json as the library's config object. Raises BadModel."""
    kind = stored.get("model_type")
    if not isinstance(kind, str):
        raise BadModel("the config has no model_type, which says its architecture")
    require_no_code(stored, "the config", KNOWN_TYPES)
    known_as = ARCHITECTURE_OF.get(kind, kind)
    if known_as not in CONFIG_MAPPING:
        raise BadModel(f"the config is of a {kind} model, which the library does not know")
    own = {name: value for name, value in stored.items() if name not in ("model_type", "auto_map", "architectures")}
    try:
        return CONFIG_MAPPING[known_as].from_dict(own)
    except Exception as error:  # the library reports a broken config with whatever its many config classes raise
        raise BadModel(f"the config of a {kind} model cannot be read: {error}") from error
