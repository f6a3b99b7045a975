"""Differences between GPU and CPU; everything else of the engine is the same on both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from cairn.engines.training.megatron.permitted import TESTED_VERSION
from cairn.engines.types.errors import EngineError


@dataclass(frozen=True)
class Backend:
    """Device that Megatron runs on, and the modules that it builds a layer from."""

    device: torch.device
    process_group: str
    """Backend of torch.distributed."""
    layer_spec: Callable[..., Any]
    """Megatron's specification of a layer: (TransformerConfig, whether its feed-forward part has experts) → spec.
    Parameters have Transformer Engine's names on every device, so checkpoints, conversion and sync do not differ."""
    norm: type
    """Module of a norm that is not merged into a linear layer."""
    overrides: Callable[[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
    """Fields of TransformerConfig that this device needs; arguments as in `fusions_on_gpu`."""


def backend_for(device: torch.device) -> Backend:
    """Return the backend of a device; on the CPU, prepare megatron-core first.

    Raises:
        EngineError: megatron-core has another version than the tested one, or see
            `cairn.engines.training.megatron.cpu.install`.
    """
    if (installed := version("megatron-core")) != TESTED_VERSION:
        raise EngineError(f"megatron-core {TESTED_VERSION} is needed, and {installed} is installed")
    return _cpu() if device.type == "cpu" else _gpu(device)


def _cpu() -> Backend:
    from cairn.engines.training.megatron import cpu

    cpu.install()
    return without_transformer_engine(torch.device("cpu"), "gloo", use_cpu_initialization=True)


def without_transformer_engine(device: torch.device, process_group: str, **overrides: Any) -> Backend:
    """Return a backend whose layers consist of PyTorch's modules.

    Args:
        overrides: further fields of TransformerConfig.
    """
    from cairn.engines.training.megatron.cpu_modules import Norm, layer_spec

    fusions = ("bias_dropout_fusion", "bias_activation_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    return Backend(
        device=device,
        process_group=process_group,
        layer_spec=layer_spec,
        norm=Norm,
        overrides=lambda *_: {
            **dict.fromkeys(fusions, False),
            "gradient_accumulation_fusion": False,
            "persist_layer_norm": False,
            **overrides,
        },
    )


def _gpu(device: torch.device) -> Backend:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    def spec(config: Any, *, experts: bool) -> Any:
        layer = get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts if experts else None,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
        )
        if config.experimental_attention_variant == "dsa":
            layer.submodules.self_attention = get_dsa_module_spec_for_backend(config, TESpecProvider())
        return layer

    return Backend(device=device, process_group="nccl", layer_spec=spec, norm=TENorm, overrides=fusions_on_gpu)


EXTENSION = "fused_weight_gradient_mlp_cuda"
"""Module that adds a product to a gradient: part of APEX."""


def fusions_on_gpu(family: Mapping[str, Any], model: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, bool]:
    """Return the fields of TransformerConfig that select fused kernels; Megatron's own defaults fuse nothing.

    | option | where it is left off |
    |---|---|
    | `bias_activation_fusion` | with `use_te_activation_func`; clamped gates with biases in ungrouped experts (1) |
    | `bias_dropout_fusion` | models with biases, whose grouped experts refuse it |
    | `masked_softmax_fusion` | never |
    | `apply_rope_fusion` | latent attention and YaRN (2) |
    | `gradient_accumulation_fusion` | without the extension that Megatron's output layer needs |
    | `moe_grouped_gemm`, `moe_permute_fusion` | models without experts |

    (1) gpt-oss: 0.19.2, fusions/fused_bias_geglu.py, clamps before it adds a bias. Grouped experts have added it by
    then.
    (2) 0.19.2, models/common/embeddings/rope_utils.py, leaves out YaRN's factor of packed samples.

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
