"""Options from which engines are made: those that each engine reads, at its start and later, and no others.

An engine gets its configuration through a view of exactly these options. Their digest is an input of every step that
calls the engine, so a sample or an update records which engine made it.
"""

from types import SimpleNamespace

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


def reader_of(engine: str, **sections: Section) -> Reader:
    """Return the engine `rollout` or `training` as a reader of the configuration.

    Args:
        sections: the sections that name user code, whose own declared options are added.
    """
    reads = reads_under(SimpleNamespace(**sections), ENGINES[engine]) if sections else ENGINES[engine]
    return Reader(f"the {engine} engine", "ENGINES in cairn.configs.engines, or `reads` of your `cairn.plugin`", reads)
