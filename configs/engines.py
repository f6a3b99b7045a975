"""Options from which engines are made: those that each engine reads, at its start and later, and no others.

An engine gets its configuration through a view of exactly these options. Their digest is an input of every step that
calls the engine, so a sample or an update records which engine made it.
"""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.base import Section
from cairn.configs.schema.training import TrainingConfig
from cairn.configs.view import Reader, reads_under

_OF_ADVANTAGES = (
    *("rewards_normalization", "grpo_std_normalization", "normalize_advantages", "gamma", "lambd"),
    *("bootstrap_truncated", "gdpo_reward_keys", "gdpo_reward_weights", "opd_kl_coef"),
)
"""Options of `algorithm` that only estimators of advantages and the driver read."""


def _all_but(section: type[Section], name: str, *others: str) -> Iterator[str]:
    """Yield all options of a section but some."""
    return (f"{name}.{option}" for option in section.model_fields if option not in others)


ENGINES: dict[str, tuple[str, ...]] = {
    "rollout": (
        "rollout.engine",
        "rollout.model_path",
        "rollout.sglang",
        "rollout.sglang_env_vars",
        "rollout.router",
        "rollout.server_groups",
        "rollout.external_urls",
        "rollout.num_gpus_per_engine",
        "rollout.num_gpus_per_node",
        "rollout.num_threads",
        "rollout.dtype",
        "rollout.max_running_requests",
        "rollout.max_tokens_in_flight",
        "rollout.sglang_server_concurrency",
        "rollout.rollout_stop",
    ),
    "training": (
        *_all_but(TrainingConfig, "training", "global_batch_size", "timeout", "distributed_timeout_minutes"),
        *_all_but(AlgorithmConfig, "algorithm", *_OF_ADVANTAGES),
        "rollout.rollout_temperature",
    ),
}


LAYOUT_OF_MEGATRON = """
    tensor_model_parallel_size sequence_parallel context_parallel_size cp_comm_type
    pipeline_model_parallel_size virtual_pipeline_model_parallel_size microbatch_group_size_per_vp_stage
    pipeline_model_parallel_layout num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    expert_model_parallel_size expert_tensor_parallel_size use_distributed_optimizer
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer
"""
"""Megatron's own options among `LAYOUT`."""

LAYOUT: tuple[str, ...] = (
    "training.world_size",
    "training.context_parallel_size",
    "training.max_tokens_per_gpu",
    "training.micro_batch_size",
    "training.gradient_checkpointing",
    "training.fsdp_cpu_offload",
    *(f"training.megatron.{name}" for name in LAYOUT_OF_MEGATRON.split()),
    "rollout.num_engines",
    "rollout.num_gpus_per_engine",
    "rollout.num_gpus_per_node",
    "rollout.max_running_requests",
    "rollout.max_tokens_in_flight",
)
"""Options that place the work of a run on its ranks and engines. Other values give the same results but for rounding,
so a run may change them while it goes on (`cairn resume --set`)."""


_MISSING: Any = object()


def layout_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return (value before, value after) of each option of the layout in which two configurations in JSON values
    differ, by its dotted name. Options that the version that wrote one of them did not have are left out."""
    found = {name: (_value(before, name), _value(after, name)) for name in LAYOUT}
    return {name: both for name, both in found.items() if _MISSING not in both and both[0] != both[1]}


def _value(config: Mapping[str, Any], name: str) -> Any:
    """Return the value of an option; None where a mapping of an engine's own options leaves it out."""
    section, option, *of_engine = name.split(".")
    value = config.get(section, {}).get(option, _MISSING)
    return value.get(of_engine[0]) if of_engine and value is not _MISSING else value


def reader_of(engine: str, **sections: Section) -> Reader:
    """Return the engine `rollout` or `training` as a reader of the configuration.

    Args:
        sections: the sections that name user code, whose own declared options are added.
    """
    reads = reads_under(SimpleNamespace(**sections), ENGINES[engine]) if sections else ENGINES[engine]
    return Reader(f"the {engine} engine", "ENGINES in cairn.configs.engines, or `reads` of your `cairn.plugin`", reads)
