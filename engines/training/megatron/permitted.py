"""Megatron's options that a configuration may set: those that place, speed up or check the work.

All others change the model, the loss or the optimizer, belong to a way of training that Cairn does not support, or
follow from something else.

A module apart from `options.py`, because a check of a stored configuration needs no PyTorch.
"""

from cairn.configs.engines import LAYOUT_OF_MEGATRON

TESTED_VERSION = "0.19.2"
"""Version of megatron-core whose options these are; `backend.py` rejects any other."""

MEMORY = """
    distribute_saved_activations moe_layer_recompute num_microbatches_with_partial_activation_checkpoints
    deallocate_pipeline_outputs cpu_offloading cpu_offloading_num_layers cpu_offloading_activations
    cpu_offloading_weights cpu_offloading_double_buffering fine_grained_activation_offloading offload_modules
    min_offloaded_tensor_size memory_efficient_layer_norm disable_parameter_transpose_cache
    clone_scatter_output_in_embedding
"""

COMMUNICATION = """
    tp_comm_overlap tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag
    tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_atomic_ag tp_comm_split_rs tp_comm_atomic_rs
    tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1 tp_comm_bootstrap_backend symmetric_ar_type
    pipeline_model_parallel_comm_backend overlap_p2p_comm overlap_p2p_comm_warmup_flush batch_p2p_comm batch_p2p_sync
    use_ring_exchange_p2p defer_embedding_wgrad_compute wgrad_deferral_limit
    moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend moe_deepep_num_sms moe_hybridep_num_sms
    overlap_grad_reduce bucket_size pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation nccl_ub
    disable_symmetric_registration
"""

KERNELS = """
    attention_backend attention_softmax_in_fp32 batch_invariant_mode dsa_kernel_backend
    disable_bf16_reduced_precision_matmul
    apply_rope_fusion bias_activation_fusion bias_dropout_fusion fused_single_qkv_rope gradient_accumulation_fusion
    masked_softmax_fusion persist_layer_norm use_te_activation_func
    moe_grouped_gemm moe_permute_fusion moe_router_fusion
    cuda_graph_impl cuda_graph_scope cuda_graph_use_single_mempool cuda_graph_retain_backward_graph
    cuda_graph_warmup_steps enable_cuda_graph external_cuda_graph use_te_rng_tracker use_cpu_initialization
"""

CHECKS = "barrier_with_L1_time check_for_large_grads check_for_nan_in_grad"

PERMITTED = frozenset(" ".join((LAYOUT_OF_MEGATRON, MEMORY, COMMUNICATION, KERNELS, CHECKS)).split())
