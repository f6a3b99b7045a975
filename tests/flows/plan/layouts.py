"""Layouts that slime's scripts train published models in, on GPUs of 80 GB (H100, H800), as recipes."""

from dataclasses import dataclass, field
from typing import Any

from cairn.configs.loader import parse
from cairn.configs.schema.run import RunConfig

OFFLOADING = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
"""Options that have the optimizer in the host's memory."""


@dataclass(frozen=True)
class Published:
    """A script of slime's, by its name in its repository's `scripts`."""

    script: str
    model: str
    gpus: int
    """That train."""
    megatron: dict[str, Any]
    max_tokens: int
    gpus_per_engine: int
    batch: tuple[int, int]
    """Prompts, and samples of each."""
    response: int
    sglang: dict[str, Any] = field(default_factory=dict)
    offloaded: bool = False
    """Whether the optimizer's state is in the host's memory (`--optimizer-cpu-offload`)."""
    apart: int = 0
    """GPUs of the rollout engines, where these are others."""

    @property
    def config(self) -> RunConfig:
        prompts, samples = self.batch
        return parse(
            {
                "model": {"path": f"models/{self.model}"},
                "data": {"path": "dapo-math-17k.jsonl"},
                "reward": {"rm_type": "deepscaler"},
                "rollout": {
                    "engine": "sglang",
                    "num_rollout": 3000,
                    "rollout_batch_size": prompts,
                    "n_samples_per_prompt": samples,
                    "rollout_max_prompt_len": 1024,
                    "rollout_max_response_len": self.response,
                    "num_engines": (self.apart or self.gpus) // self.gpus_per_engine,
                    "num_gpus_per_engine": self.gpus_per_engine,
                    "dtype": "bfloat16",
                    "sglang": self.sglang,
                },
                "training": {
                    "engine": "megatron",
                    "world_size": self.gpus,
                    "num_gpus_per_rank": 1,
                    "dtype": "bfloat16",
                    "gradient_checkpointing": True,
                    "max_tokens_per_gpu": self.max_tokens,
                    "megatron": {
                        "sequence_parallel": True,
                        "use_distributed_optimizer": True,
                        **(OFFLOADING if self.offloaded else {}),
                        **self.megatron,
                    },
                },
                "fleet": {
                    "colocate": not self.apart,
                    "update_weight_transport": "distributed" if self.apart else "tensor",
                },
                "checkpoint": {"save_interval": 20},
            }
        )


def _cut(tensor: int, pipeline: int = 1, context: int = 1, expert: int = 0, last: int | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": context,
    }
    if expert:
        options |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": 1}
    if last is not None:
        options["num_layers_in_last_pipeline_stage"] = last
    return options


STATIC = {"mem_fraction_static": 0.7}


def _groups(count: int, experts: int) -> dict[str, Any]:
    return {
        **STATIC,
        "attn_dp_size": count,
        "moe_dense_tp_size": 1,
        "enable_dp_lm_head": True,
        "ep_size": experts,
    }


LAYOUTS = (
    Published("run-qwen3-4B", "Qwen3-4B", 8, _cut(2), 9216, 2, (32, 8), 8192, STATIC),
    Published("run-glm4-9B", "GLM-Z1-9B-0414", 4, _cut(2, context=2), 4608, 2, (32, 8), 8192, apart=4),
    Published("run-qwen3-30B-A3B", "Qwen3-30B-A3B", 8, _cut(4, expert=8), 20480, 8, (32, 8), 8192, STATIC, True),
    Published("run-qwen3-32B", "Qwen3-32B", 8, _cut(8), 20480, 8, (32, 8), 8192, STATIC, True),
    Published(
        "run-moonlight-16B-A3B",
        "Moonlight-16B-A3B-Instruct",
        8,
        _cut(4, expert=8),
        8192,
        8,
        (128, 8),
        4096,
        STATIC,
        True,
    ),
    Published(
        "run-qwen3-235B-A22B",
        "Qwen3-235B-A22B",
        64,
        _cut(4, 4, 2, 16, last=22),
        16384,
        32,
        (8, 8),
        8192,
        _groups(4, 32),
        True,
        apart=64,
    ),
    Published(
        "run-glm4.7-355B-A32B", "GLM-4.7", 64, _cut(8, 4, 2, 16), 16384, 32, (128, 8), 32768, _groups(4, 32), True, 64
    ),
    Published(
        "run-deepseek-r1",
        "DeepSeek-R1",
        128,
        _cut(8, 4, 4, 32, last=13),
        16384,
        64,
        (128, 8),
        32768,
        _groups(8, 64),
        True,
        128,
    ),
)
"""Those that its documentation runs on GPUs of 80 GB, and others of one machine. Where rollout engines span machines
they have their own GPUs here, as many."""

NEED_OFFLOADING = ("run-glm4.7-355B-A32B", "run-deepseek-r1")
"""Scripts whose optimizer has to be in the host's memory, as slime's documentation says. It says so of
run-qwen3-30B-A3B too, whose weights, gradients and moments leave 10 GiB here."""
