"""Options from which engines are made: those that each engine reads, at its start and later, and no others.

An engine gets its configuration through a view of exactly these options. Their digest is an input of every step that
calls the engine, so a sample or an update records which engine made it.
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from cairn.configs.schema.base import Section
from cairn.configs.view import Reader, reads_under

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
        "training.engine",
        "training.megatron",
        "training.train_env_vars",
        "training.world_size",
        "training.num_gpus_per_rank",
        "training.num_threads",
        "training.dtype",
        "training.deterministic_mode",
        "training.gradient_checkpointing",
        "training.fsdp_cpu_offload",
        "training.sequence_packing",
        "training.context_parallel_size",
        "training.num_steps_per_rollout",
        "training.max_tokens_per_gpu",
        "training.micro_batch_size",
        "training.optimizer",
        "training.lr",
        "training.min_lr",
        "training.lr_decay_style",
        "training.lr_warmup_iters",
        "training.lr_warmup_fraction",
        "training.lr_warmup_init",
        "training.lr_decay_iters",
        "training.lr_wsd_decay_style",
        "training.lr_wsd_decay_iters",
        "training.critic_lr",
        "training.critic_lr_warmup_iters",
        "training.critic",
        "training.weight_decay",
        "training.weight_decay_incr_style",
        "training.start_weight_decay",
        "training.end_weight_decay",
        "training.reset_optimizer_states",
        "training.moe_router_bias_update_rate",
        "training.adam_beta1",
        "training.adam_beta2",
        "training.adam_eps",
        "training.clip_grad",
        "training.only_train_params_name_list",
        "training.freeze_params_name_list",
        "training.lora",
        "algorithm.loss_type",
        "algorithm.advantage_estimator",
        "algorithm.kl_coef",
        "algorithm.value_clip",
        "algorithm.dpo_beta",
        "algorithm.dpo_label_smoothing",
        "algorithm.num_critic_only_steps",
        "algorithm.eps_clip",
        "algorithm.eps_clip_high",
        "algorithm.eps_clip_c",
        "algorithm.clip_cov_ratio",
        "algorithm.clip_cov_lb",
        "algorithm.clip_cov_ub",
        "algorithm.kl_cov_ratio",
        "algorithm.ppo_kl_coef",
        "algorithm.entropy_coef",
        "algorithm.use_kl_loss",
        "algorithm.kl_loss_coef",
        "algorithm.kl_loss_type",
        "algorithm.ref_update_interval",
        "algorithm.use_opd",
        "algorithm.distillation_loss_coef",
        "algorithm.distillation_topk",
        "algorithm.use_rollout_logprobs",
        "algorithm.use_rollout_routing_replay",
        "algorithm.use_tis",
        "algorithm.custom_tis_function_path",
        "algorithm.tis_clip",
        "algorithm.tis_clip_low",
        "algorithm.use_opsm",
        "algorithm.opsm_delta",
        "algorithm.use_unbiased_kl",
        "algorithm.tis_level",
        "algorithm.tis_mode",
        "algorithm.use_rs",
        "algorithm.rs_level",
        "algorithm.rs_lower_bound",
        "algorithm.rs_upper_bound",
        "algorithm.rs_veto_threshold",
        "algorithm.tis_batch_normalize",
        "algorithm.get_mismatch_metrics",
        "algorithm.custom_pg_loss_reducer_function_path",
        "algorithm.calculate_per_token_loss",
        "algorithm.loss_scale_factor",
        "rollout.rollout_temperature",
    ),
}


_OF_MEGATRON = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "cp_comm_type",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "microbatch_group_size_per_vp_stage",
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "optimizer_cpu_offload",
    "optimizer_offload_fraction",
    "overlap_cpu_optimizer_d2h_h2d",
    "use_precision_aware_optimizer",
)

LAYOUT: tuple[str, ...] = (
    "training.world_size",
    "training.context_parallel_size",
    "training.max_tokens_per_gpu",
    "training.micro_batch_size",
    "training.gradient_checkpointing",
    "training.fsdp_cpu_offload",
    *(f"training.megatron.{name}" for name in _OF_MEGATRON),
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
