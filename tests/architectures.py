"""Tiny random models of every published architecture, made by transformers: the real classes and the published names of
the weights, small sizes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCABULARY = 320

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
HEADS: dict[str, Any] = {"head_dim": 16}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-3,
}
"""Multi-head latent attention, whose own norms have another epsilon: 1e-6, whatever the config says of the layers',
which is so large here that a mistake shows."""

SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}
"""Sigmoid routing with a correction bias, a shared expert, and a dense first layer."""

DEEPSEEK: dict[str, Any] = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
"""As published; transformers reads none of it, SGLang does."""

GROUPS: dict[str, Any] = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
"""Experts in groups, of which the best two experts of each decide which groups are chosen from."""

INDEXER: dict[str, Any] = {"index_topk": 16, "index_n_heads": 32, "index_head_dim": 16}
"""Sparse attention. With few heads, a ReLU makes scores of some keys 0, and equal keys are chosen by chance."""

SOFTMAX: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LLAMA_31: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
"""Gated delta networks beside gated attention."""

SHARED_SOFTMAX: dict[str, Any] = {**SOFTMAX, "shared_expert_intermediate_size": 32}


@dataclass(frozen=True)
class Architecture:
    """One of the architectures."""

    name: str
    model_type: str
    """As in config.json, of a class of transformers."""
    models: str
    """Published models that have it."""
    config: dict[str, Any] = field(default_factory=dict)
    """Beside `SIZES`."""
    named: bool = True
    """Whether Cairn promises it; the others are what slime has scripts for besides."""

    @property
    def experts(self) -> bool:
        return "num_experts_per_tok" in self.config

    def make_config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.model_type, **{**SIZES, **self.config})

    def make(self, seed: int = 0) -> PreTrainedModel:
        """A model in float32 whose every weight and buffer is random: what is 0 or 1 at first would hide mistakes."""
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(self.make_config(), dtype=torch.float32)
        with torch.no_grad():
            for name, value in model.state_dict().items():
                if name.endswith("tid2eid"):  # experts by a token's id
                    value.copy_(torch.rand(len(value), model.config.n_routed_experts).topk(value.shape[1]).indices)
                elif "norm" in name or value.dim() == 1:
                    value.add_(torch.randn_like(value) * 0.1)
            model.get_input_embeddings().weight[0].normal_(std=0.1)  # of padding, which an indexer's scores would tie
        return model.eval()

    def save(self, folder: Path, seed: int = 0) -> Path:
        """Write a model folder, weights named as published ones."""
        self.make(seed).save_pretrained(folder)
        if self.model_type == "deepseek_v4":  # which the library writes otherwise than it is published
            weights = load_file(folder / "model.safetensors")
            save_file({_published(name): weight for name, weight in weights.items()}, folder / "model.safetensors")
        return folder


def _published(name: str) -> str:
    """As DeepSeek V4's own code has it (`embed`, `hc_head_fn`, `layers.0.attn.kv_norm`)."""
    name = name.removeprefix("model.").replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


ARCHITECTURES = (
    Architecture("qwen2", "qwen2", "Qwen2.5", {"tie_word_embeddings": True}),
    Architecture("qwen3", "qwen3", "Qwen3 dense", {**HEADS, "tie_word_embeddings": True}),
    Architecture("qwen3_moe", "qwen3_moe", "Qwen3 MoE", {**HEADS, **SOFTMAX, "norm_topk_prob": True}),
    Architecture("llama", "llama", "Llama 3", HEADS),
    Architecture(
        "llama3.1",
        "llama",
        "Llama 3.1 to 3.3",
        {**HEADS, "rope_parameters": LLAMA_31, "max_position_embeddings": 16384},
    ),
    Architecture("glm4", "glm4", "GLM-4-9B, GLM-Z1-9B", {**HEADS, "attention_bias": True}),
    Architecture(
        "glm4_moe",
        "glm4_moe",
        "GLM-4.5, GLM-4.6, GLM-4.7",
        {**HEADS, **SIGMOID, "use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    Architecture(
        "glm4_moe_air",
        "glm4_moe",
        "GLM-4.5-Air",
        {**HEADS, **SIGMOID, "use_qk_norm": False, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    Architecture(
        "deepseek_v3",
        "deepseek_v3",
        "DeepSeek V3, V3.1 and R1, Kimi K2 to K2.6",
        {**LATENT, **SIGMOID, **DEEPSEEK, **GROUPS, "rope_parameters": YARN},
    ),
    Architecture(
        "moonlight",
        "deepseek_v3",
        "Moonlight-16B-A3B",
        {**LATENT, **SIGMOID, **DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
    ),
    Architecture(
        "glm4_moe_lite",
        "glm4_moe_lite",
        "GLM-4.7-Flash",
        {**LATENT, **SIGMOID, "n_group": 1, "topk_group": 1},
    ),
    Architecture("qwen2_moe", "qwen2_moe", "Qwen1.5-MoE, Qwen2-57B-A14B", SHARED_SOFTMAX, named=False),
    Architecture(
        "qwen3_next",
        "qwen3_next",
        "Qwen3-Next-80B-A3B",
        {**HEADS, **SHARED_SOFTMAX, **DELTA, "full_attention_interval": 2},  # which SGLang reads
        named=False,
    ),
    Architecture("qwen3_5", "qwen3_5_text", "Qwen3.5, Qwen3.6 and Qwen3.8 dense", {**HEADS, **DELTA}, named=False),
    Architecture(
        "qwen3_5_moe", "qwen3_5_moe_text", "Qwen3.5 and Qwen3.6 MoE", {**HEADS, **SHARED_SOFTMAX, **DELTA}, named=False
    ),
    Architecture(
        "minimax_m2",
        "minimax_m2",
        "MiniMax-M2",
        {
            **HEADS,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "scoring_func": "sigmoid",  # SGLang reads this and the next three
            "use_routing_bias": True,
            "use_qk_norm": True,
            "rotary_dim": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
        named=False,
    ),
    Architecture(
        "gpt_oss",
        "gpt_oss",
        "gpt-oss",
        {
            **HEADS,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**{k: v for k, v in YARN.items() if "mscale" not in k}, "truncate": False},
        },
        named=False,
    ),
    Architecture("mistral", "mistral", "Mistral 7B, Nemo and Small", {**HEADS, "sliding_window": None}, named=False),
    Architecture("seed_oss", "seed_oss", "Seed-OSS-36B", HEADS, named=False),
    Architecture(
        "glm_moe_dsa",
        "glm_moe_dsa",
        "GLM-5, GLM-5.1, GLM-5.2",
        {
            **LATENT,
            **SIGMOID,
            **INDEXER,
            "n_group": 1,
            "topk_group": 1,
            "indexer_types": ["full", "shared"] * 2,
        },
        named=False,
    ),
    Architecture(
        "deepseek_v32",
        "deepseek_v32",
        "DeepSeek V3.2",
        {**LATENT, **SIGMOID, **DEEPSEEK, **GROUPS, **INDEXER, "rope_parameters": YARN},
        named=False,
    ),
    Architecture(
        "deepseek_v4",
        "deepseek_v4",
        "DeepSeek V4",
        {
            "num_hidden_layers": 6,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 24,
            "o_groups": 2,
            "o_lora_rank": 8,
            "num_experts_per_tok": 3,
            "n_routed_experts": 8,
            "moe_intermediate_size": 32,
            "mlp_layer_types": ["hash_moe"] + ["moe"] * 5,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "sliding_window": 16,
            **INDEXER,
            "index_topk": 4,
        },
        named=False,
    ),
)


def architecture(name: str) -> Architecture:
    return next(each for each in ARCHITECTURES if each.name == name)
