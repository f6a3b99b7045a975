"""Which models SGLang's servers do not serve without a GPU, and why: found by `python -m tests.sglang_architectures`,
of the version that `cpu/` stands in for."""

_LATENT = "its attention for CPUs looks for whole keys and values in a cache of latents"
_GATED = "its model needs sgl_kernel's fused_sigmoid_mul_cpu"

UNSERVED = {
    "deepseek_v3": _LATENT,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": "its sparse attention asks for the properties of a CUDA device",
    "qwen2_moe": "its shared experts need a Triton kernel, fused_gate_sigmoid_mul_add",
    "qwen3_next": "its linear attention needs sgl_kernel.mamba",
    "qwen3_5_text": _GATED,
    "qwen3_5_moe_text": _GATED,
    "minimax_m2": "the norm of its queries and keys is a kernel for CUDA",
    "gpt_oss": "it has attention with sinks for GPUs and CPUs with AMX only",
}
"""Model type -> what is missing."""
