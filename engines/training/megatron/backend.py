"""Differences between GPU and CPU; everything else of the engine is the same on both."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from cairn.engines.training.megatron.fusions import fusions_on_gpu
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
    """Fields of TransformerConfig that this device needs; arguments as in
    `cairn.engines.training.megatron.fusions.fusions_on_gpu`."""


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
