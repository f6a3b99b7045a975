"""The driver's knowledge of `rollout.engine: sglang`."""

from collections.abc import Iterable

from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import EngineKind
from cairn.engines.rollout.sglang.launch_plan import launch_plan, plan_problems

# Options of servers and routers that a store may set: numbers, switches and words that place, bound, schedule or check
# the work, or choose a kernel.
#
# All others need a recipe: options that name files, addresses, programs, modules or models, options that hold JSON, and
# options that a later SGLang adds. `cairn.flows.driver.trust` says what a permitted option may hold.


LAYOUT = """
    tp_size pp_size dp_size attn_dp_size ep_size attn_cp_size dcp_size moe_dp_size moe_dense_tp_size base_gpu_id
    gpu_id_step device load_balance_method enable_dp_attention enable_dp_lm_head numa_node nccl_port
    pp_max_micro_batch_size pp_async_batch_depth max_ep_size ep_num_redundant_experts ep_dispatch_algorithm
"""

MEMORY = """
    mem_fraction_static max_total_tokens max_prefill_tokens chunked_prefill_size prefill_max_requests page_size
    context_length cpu_offload_gb kv_cache_dtype swa_full_tokens_ratio enable_memory_saver enable_weights_cpu_backup
    max_mamba_cache_size mamba_full_memory_ratio mamba_ssm_dtype
    disable_hybrid_swa_memory disable_radix_cache disable_chunked_prefix_cache radix_eviction_policy
    enable_hierarchical_cache hicache_ratio hicache_size hicache_write_policy hicache_io_backend hicache_mem_layout
    weight_loader_disable_mmap weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
"""

SCHEDULING = """
    max_queued_requests schedule_policy schedule_conservativeness retraction_policy num_continuous_decode_steps
    num_reserved_decode_tokens stream_interval scheduler_recv_interval enable_mixed_chunk disable_overlap_schedule
    enable_priority_scheduling schedule_low_priority_values_first priority_scheduling_preemption_threshold
    abort_on_priority_when_disabled enable_dynamic_chunking enable_two_batch_overlap enable_single_batch_overlap
    tbo_token_distribution_threshold sleep_on_idle gc_threshold
    disaggregation_transfer_backend disaggregation_decode_polling_interval disaggregation_decode_extra_slots
"""

KERNELS = """
    attention_backend prefill_attention_backend decode_attention_backend sampling_backend grammar_backend
    moe_runner_backend moe_a2a_backend deepep_mode bf16_gemm_backend linear_attn_backend mamba_backend
    linear_attn_decode_backend linear_attn_prefill_backend
    quantization rl_on_policy_target enable_deterministic_inference random_seed enable_fp32_lm_head
    triton_attention_num_kv_splits triton_attention_reduce_in_fp32 triton_attention_split_tile_size
    flashinfer_mla_disable_ragged enable_flashinfer_allreduce_fusion enable_tf32_matmul
    disable_cuda_graph disable_cuda_graph_padding disable_decode_cuda_graph disable_prefill_cuda_graph
    cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_max_bs_decode cuda_graph_max_bs_prefill
    cuda_graph_backend_decode cuda_graph_backend_prefill
    disable_custom_all_reduce disable_shared_experts_fusion enable_fused_moe_sum_all_reduce
    enable_mscclpp enable_symm_mem enable_torch_symm_mem enable_nccl_nvls pre_warm_nccl
    enable_torch_compile torch_compile_max_bs enable_p2p_check
    speculative_num_steps speculative_eagle_topk speculative_num_draft_tokens
"""

CHECKS = """
    watchdog_timeout soft_watchdog_timeout dist_timeout skip_server_warmup log_level log_level_http
    log_requests log_requests_level decode_log_interval show_time_cost enable_metrics enable_cache_report
    sampling_mask_max_tokens enable_return_routed_experts enable_return_hidden_states
"""

PERMITTED = frozenset(" ".join((LAYOUT, MEMORY, SCHEDULING, KERNELS, CHECKS)).split())

ROUTER = """
    policy prefill_policy decode_policy assignment_mode balance_abs_threshold balance_rel_threshold cache_threshold
    bucket_adjust_interval_secs eviction_interval_secs max_tree_size max_idle_secs dp_aware log_level
    max_concurrent_requests max_payload_size queue_size queue_timeout_secs rate_limit_tokens_per_second
    request_timeout_secs shutdown_grace_period_secs worker_startup_check_interval worker_startup_timeout_secs
    disable_circuit_breaker cb_failure_threshold cb_success_threshold cb_timeout_duration_secs cb_window_duration_secs
    disable_health_check health_check_interval_secs health_check_timeout_secs health_failure_threshold
    health_success_threshold disable_retries retry_max_retries retry_initial_backoff_ms retry_max_backoff_ms
    retry_backoff_multiplier retry_jitter_factor
"""

ROUTER_PERMITTED = frozenset(ROUTER.split())


def _problems(config: RunConfig) -> Iterable[str]:
    from cairn.engines.rollout.sglang.problems import problems  # reads models and installations, which takes long

    return problems(config)


KIND = EngineKind(
    engine="cairn.engines.rollout.sglang.engine:make",
    plan=launch_plan,
    options=("model_path", "sglang", "sglang_env_vars", "router", "server_groups", "external_urls"),
    problems=_problems,
    layout_problems=plan_problems,
    router="cairn.engines.rollout.sglang.router:make",
    spans_gpus=True,
    reports_checksum=lambda config: not config.external_urls,
    reports_loaded=True,
    holds_as_stored=True,
    copies_stored=True,
    takes_broadcasts=True,
    maps_gpu_memory=True,
    reserves_cache=True,
    caches_prefixes=True,
    bounded_by="rollout.sglang_server_concurrency",
    permitted={
        "rollout.sglang": PERMITTED,
        "rollout.server_groups.overrides": PERMITTED,
        "rollout.router": ROUTER_PERMITTED,
    },
)
