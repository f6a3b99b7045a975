"""Tiny models with layers that predict several tokens ahead, named as published ones are."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.architectures import architecture
from tests.quantized_models import Tensors, set_config

LAYER = (
    "input_layernorm.weight",
    "self_attn.q_a_proj.weight",
    "mlp.gate.e_score_correction_bias",
    "mlp.experts.0.gate_proj.weight",
    "mlp.experts.0.down_proj.weight",
)
NAMES = {
    "deepseek_v3": [
        f"model.layers.4.{part}"
        for part in (
            *LAYER,
            "eh_proj.weight",
            "enorm.weight",
            "hnorm.weight",
            "embed_tokens.weight",
            "shared_head.norm.weight",
        )
    ],
    "qwen3_next": ["mtp.fc.weight", "mtp.norm.weight", *(f"mtp.layers.0.{part}" for part in LAYER)],
    "mimo": ["model.mtp_layers.0.input_proj.weight", *(f"model.mtp_layers.0.{part}" for part in LAYER)],
}
"""By architecture."""


def mtp_folder(name: str, folder: Path) -> Tensors:
    """Write a model with such layers in bfloat16 and other weights in float32. Return the layers' tensors."""
    architecture({"mimo": "qwen2"}.get(name, name)).save(folder)
    if name == "mimo":
        set_config(folder, model_type="mimo", architectures=["MiMoForCausalLM"])
    layers = mtp_tensors(name)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **layers}, folder / "model.safetensors", metadata={"format": "pt"})
    return layers


def mtp_tensors(name: str) -> Tensors:
    draw = torch.Generator().manual_seed(7)
    return {
        key: torch.randn((48, 72) if key.endswith("proj.weight") else (64,), generator=draw).bfloat16()
        for key in NAMES[name]
    }
