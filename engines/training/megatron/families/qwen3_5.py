"""Language models of Qwen3.5, dense and with experts: like Qwen3-Next, with the input projection of a delta network in
four tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.engines.training.megatron.families.base import Layout, Source, Stretch
from cairn.engines.training.megatron.families.qwen3_next import GatedDelta, Qwen3Next, convolved


def _input_projection(config: Any) -> Sequence[Stretch]:
    """Return the stretches of queries, keys, values, their gates, beta and alpha, each of all heads."""
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    return [
        *convolved(config),
        Stretch(1, heads * width, heads, width),
        *(Stretch(part, heads, heads, 1) for part in (2, 3)),
    ]


_IN_PROJ: Mapping[str, Source] = {
    "self_attention.in_proj.weight": Source(
        Layout.HEADS, tuple(f"linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")), _input_projection
    ),
}
_DENSE: Mapping[str, Source] = {**GatedDelta.layer, **_IN_PROJ}
_EXPERTS: Mapping[str, Source] = {**Qwen3Next.layer, **_IN_PROJ}


class Qwen35(GatedDelta):
    model_type = "qwen3_5_text"
    layer = _DENSE


class Qwen35Moe(Qwen3Next):
    model_type = "qwen3_5_moe_text"
    layer = _EXPERTS
