"""Fused kernels that Megatron uses on a GPU by default; its own defaults fuse nothing.

| option | where it is left off |
|---|---|
| `bias_activation_fusion` | with `use_te_activation_func`; clamped gates with biases in ungrouped experts (1) |
| `bias_dropout_fusion` | models with biases, whose grouped experts refuse it |
| `masked_softmax_fusion` | never |
| `apply_rope_fusion` | latent attention and YaRN (2) |
| `gradient_accumulation_fusion` | without the extension that Megatron's output layer needs |
| `moe_grouped_gemm`, `moe_permute_fusion` | models without experts |

(1) gpt-oss: 0.19.2, fusions/fused_bias_geglu.py, clamps before it adds a bias. Grouped experts have added it by then.
(2) 0.19.2, models/common/embeddings/rope_utils.py, leaves out YaRN's factor of packed samples.

Imports no PyTorch.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

EXTENSION = "fused_weight_gradient_mlp_cuda"
"""Module that adds a product to a gradient: part of APEX."""


def fusions_on_gpu(family: Mapping[str, Any], model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fields of TransformerConfig that select fused kernels.

    Args:
        family: fields of the model's TransformerConfig.
        model: arguments of its GPTModel.
        options: `training.megatron`, which overrides what is returned here.
    """
    plain_rope = not family.get("multi_latent_attention") and model.get("position_embedding_type", "rope") == "rope"
    experts = bool(family.get("num_moe_experts"))
    grouped = options.get("moe_grouped_gemm", experts)
    clamped = family.get("activation_func_clamp_value") is not None and family.get("add_bias_linear") and not grouped
    return {
        "bias_activation_fusion": not (options.get("use_te_activation_func") or clamped),
        "bias_dropout_fusion": not family.get("add_bias_linear"),
        "masked_softmax_fusion": True,
        "apply_rope_fusion": plain_rope,
        "gradient_accumulation_fusion": find_spec(EXTENSION) is not None,
        "moe_grouped_gemm": experts,
        "moe_permute_fusion": experts,
    }
