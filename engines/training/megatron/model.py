"""Megatron's process groups, model and optimizer for a configuration, which need not repeat values of config.json."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn.functional import silu
from transformers import PretrainedConfig

from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import check_model_folder
from cairn.engines.training.collate import Tokens
from cairn.engines.training.megatron.backend import Backend
from cairn.engines.training.megatron.delta_net import delta_net_spec
from cairn.engines.training.megatron.families import family_of
from cairn.engines.training.megatron.families.base import Family, Layout, Source
from cairn.engines.training.megatron.freezing import frozen_tensors
from cairn.engines.training.megatron.options import options_of
from cairn.engines.training.megatron.rotary import rotate_packed
from cairn.engines.training.megatron.weights import Parameter, Sizes, load_weights, open_files, parameters_of
from cairn.engines.training.value_model import value_head

rope_utils._apply_rotary_pos_emb_thd = rotate_packed
logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # warns that it gets no new features


class PostNorm(torch.nn.Module):
    """Norm after a layer's attention or feed-forward part, which Megatron's own layers do not have.

    It replaces the module that adds a part's output to the residual stream, and normalises the output first.
    """

    def __init__(self, config: Any, norm: type[torch.nn.Module]) -> None:
        """Build the norm from `norm`, the backend's class."""
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """Return the function that adds, as Megatron requires; there is neither bias nor dropout."""

        def add(output_and_bias: tuple[torch.Tensor, None], residual: torch.Tensor, _: float) -> torch.Tensor:
            return residual + self.norm(output_and_bias[0])

        return add


class WholeNorm(torch.nn.Module):
    """Norm over all query heads, or all key heads, together; Megatron's own norms treat each head by itself.

    Each tensor-parallel rank has the weight of its own heads. The sum of squares is over all ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, heads: int) -> None:
        """
        Args:
            hidden_size: width of one head.
            heads: number of heads on all ranks.
        """
        super().__init__()
        self._width, self._eps = heads * hidden_size, eps
        local = self._width // config.tensor_model_parallel_size
        self.weight = torch.nn.Parameter(torch.ones(local, dtype=config.params_dtype))
        cut: Any = self.weight
        cut.tensor_model_parallel, cut.partition_dim, cut.partition_stride = True, 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, batch, heads, head_dim] from the same shape, for the heads of this rank."""
        squares = x.float().square().sum((-2, -1), keepdim=True)
        # Every rank's output depends on the sum, so both the sum and its gradient are summed over ranks.
        squares = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares))
        return (x * torch.rsqrt(squares / self._width + self._eps)).type_as(x) * self.weight.view(x.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what a checkpoint holds of this module; Megatron calls this on every module."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
        )


class WholeNormAttention(SelfAttention):
    """Attention whose queries and keys are normalised over all heads.

    The norms are no part of its specification, which needs `qk_layernorm`. With it Megatron would sum these norms'
    gradients over ranks, each of which has other heads.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        width, eps = self.hidden_size_per_attention_head, config.layernorm_epsilon
        self.q_layernorm = WholeNorm(config, width, eps, config.num_attention_heads)
        self.k_layernorm = WholeNorm(config, width, eps, config.num_query_groups)


class LatentAttention(MLASelfAttention):
    """Latent attention that is built from the modules of its specification.

    0.19.2, transformer.mla_qk_norm_config, puts a norm of its own before a query projection without a latent, which
    no model has there, and knows no modules but its own for a norm merged into a linear layer.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = "linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"
        return {name: getattr(submodules, name) for name in names}


# The critic's head on Megatron: linear from the hidden size to 1, in place of a policy's output layer.


SOURCES = {
    "output_layer.weight": Source(Layout.REPLICATED, ("lm_head.weight",)),
    "output_layer.bias": Source(Layout.REPLICATED, ("lm_head.bias",)),
}
"""Sources of the head's parameters, which give them the torch engine's names in the state."""


class ValueHead(torch.nn.Linear):
    """Value head on the last pipeline stage, whole on every tensor-parallel rank.

    Megatron calls it like its output layer. With sequence parallelism each rank computes the values of its own tokens.
    The values are gathered, and Megatron sums the gradients of the parameters, which are marked for it.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype)
        self._tokens_are_cut = config.sequence_parallel
        marked: list[Any] = [self.weight, self.bias]
        for parameter in marked:
            parameter.sequence_parallel = self._tokens_are_cut

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        """Return ([all tokens, batch, 1], no bias) from [tokens, batch, hidden size]; other arguments are ignored."""
        values = super().forward(input)
        if self._tokens_are_cut:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def read_values(outputs: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return [N] values of the tokens, from [T, 1] outputs."""
    return outputs.squeeze(-1).index_select(0, tokens.positions).float()


_GROUP_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)


@dataclass(frozen=True)
class Model:
    """This rank's part of a model."""

    config: TransformerConfig
    chunks: list[Any]
    """Stretches of consecutive layers, as callable modules; several with a virtual pipeline."""
    parameters: list[Parameter]
    vocabulary: int


def join_groups(training: TrainingConfig) -> None:
    """Create Megatron's process groups, replacing those of an earlier engine."""
    leave_groups()
    sizes = {name: training.megatron[name] for name in _GROUP_SIZES if training.megatron.get(name) is not None}
    # Copies of the groups over gloo would serve only Megatron's own checkpoints.
    parallel_state.initialize_model_parallel(
        **sizes,
        distributed_timeout_minutes=training.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    # Only dropout and initialisation use the seed. Neither happens, but Megatron requires a seed.
    tensor_parallel.model_parallel_cuda_manual_seed(0, force_reset_rng=True)


def leave_groups() -> None:
    """Destroy Megatron's process groups; Megatron by itself only forgets them.

    Over gloo each group has three threads, one of which wakes a hundred times a second.
    """
    for group in (parallel_state._global_process_group_list or [])[1:]:  # the first is that of all ranks
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


ACTIVATIONS = {"silu": silu, "quick_gelu": quick_gelu}
"""Functions by the names that families have for them. Megatron compares them with its own."""


def transformer_config(
    training: TrainingConfig, backend: Backend, family: Family, hf: PretrainedConfig
) -> TransformerConfig:
    """Return Megatron's configuration: the model's config.json, then the backend's fields, then the user's options."""
    dtype = getattr(torch, training.dtype)
    options = options_of("transformer", training.megatron)
    fields: dict[str, Any] = {
        **family.transformer(hf),
        **backend.overrides(family.transformer(hf), family.model(hf), training.megatron),
        "bf16": dtype is torch.bfloat16,
        "deterministic_mode": training.deterministic_mode and backend.device.type != "cpu",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # Each token's weight in the loss is known in advance, so gradients are summed and never divided. This is set
        # before DistributedDataParallel is built, which would otherwise average silently.
        "calculate_per_token_loss": True,
        "variable_seq_lengths": training.pipeline_model_parallel_size > 1,
    }
    if training.gradient_checkpointing:
        fields |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if training.megatron.get("virtual_pipeline_model_parallel_size") is not None:
        fields |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    fields["activation_func"] = ACTIVATIONS[fields["activation_func"]]
    # Megatron's model reads these attributes of the configuration, whose class does not declare them.
    undeclared = {name: fields.pop(name) for name in list(fields) if name.startswith("yarn_")}
    kind = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    config = kind(**{**fields, **options})
    for name, value in undeclared.items():
        setattr(config, name, value)
    return config


def load_model(
    folder: Path, training: TrainingConfig, backend: Backend, *, trained: bool = True, critic: bool = False
) -> Model:
    """Build this rank's part of a model and fill it from the folder's weight files.

    Args:
        critic: replace the output layer by a value head (see `cairn.engines.training.value_model`).

    Raises:
        BadModel: the folder cannot be used, or Megatron has no mapping for its model.
    """
    hf = check_model_folder(folder).get_text_config()
    family = family_of(hf)
    config = transformer_config(training, backend, family, hf)
    sizes = Sizes(
        vocabulary=hf.vocab_size,
        head_dim=config.kv_channels,
        query_heads=config.num_attention_heads // config.num_query_groups,
        groups=config.num_query_groups,
        tied=family.model(hf)["share_embeddings_and_output_weights"] and not critic,
    )
    bare = _build(config, backend, family, hf, critic=critic)
    chunks = [Float16Module(config, chunk) if config.bf16 else chunk for chunk in bare]
    _keep_biases_exact(bare)

    def source_of(name: str) -> Source:
        return SOURCES[name] if critic and name in SOURCES else family.parameter(name)

    parameters = parameters_of(bare, config, source_of, sizes)
    overrides: dict[str, torch.Tensor] = {}
    if critic:
        overrides = dict(zip(("lm_head.weight", "lm_head.bias"), value_head(folder, hf.hidden_size), strict=True))
    load_weights(parameters, open_files(folder), overrides)
    frozen = family.untrained(hf) if critic else frozen_tensors(family, hf, training) if trained else frozenset()
    for parameter in parameters:
        if isinstance(parameter.value, torch.nn.Parameter):
            parameter.value.requires_grad_(trained and not frozen.issuperset(parameter.names))
        if parameter.expert and parameter.value.dim() == 1:
            _mark_bias(parameter.value)
    if frozen:
        _let_gradients_through(bare, config)
    return Model(config, chunks, parameters, sizes.vocabulary)


def wrap(model: Model, training: TrainingConfig) -> list[Any]:
    """Return the chunks in Megatron's DistributedDataParallel, which sums gradients in float32."""
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options_of("ddp", training.megatron))
    return [
        DistributedDataParallel(model.config, options, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(model.chunks)
    ]


def build_optimizer(training: TrainingConfig, model: Model, wrapped: list[Any]) -> Any:
    """Return Megatron's optimizer: AdamW, which decays only matrices.

    With `use_distributed_optimizer` each data-parallel rank holds a part of its state. With `optimizer_cpu_offload` it
    is a HybridDeviceOptimizer, which holds and updates master weights and moments in the host's memory.
    """
    config = model.config
    options = OptimizerConfig(
        **{
            "optimizer": training.optimizer,
            "lr": training.lr,
            "min_lr": training.min_lr,
            "weight_decay": training.weight_decay,
            "adam_beta1": training.adam_beta1,
            "adam_beta2": training.adam_beta2,
            "adam_eps": training.adam_eps,
            "clip_grad": training.clip_grad,
            "bf16": config.bf16,
            "params_dtype": config.params_dtype,
            "optimizer_offload_fraction": 1.0,
            "pin_cpu_grads": model.parameters[0].value.is_cuda,
            **options_of("optimizer", training.megatron),
        }
    )
    optimizer = get_megatron_optimizer(options, wrapped, use_gloo_process_groups=False)
    # Where only experts are trained, the optimizer of all other parameters is a stub on all ranks.
    optimizer.chained_optimizers = [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]
    for part in optimizer.chained_optimizers:
        for buffer in getattr(part, "buffers", ()):
            _count_padding(buffer)
        if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.Adam):
            _let_count_steps(part)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    no_sync = [chunk.no_sync for chunk in wrapped]
    config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return optimizer


def _count_padding(buffer: Any) -> None:
    """Count the padding at the ends of a buffer's buckets as content.

    0.19.2, optimizer.distrib_optimizer, writes checkpoints from tensors that are as long as a buffer without this
    padding, but at offsets that include it. After the first bucket states are shifted, and the last ones cut off. With
    the padding counted, they are not.
    """
    buffer.numel_unpadded = buffer.numel
    for bucket in buffer.buckets:
        bucket.numel_unpadded = bucket.grad_data.numel()


def _let_count_steps(part: Any) -> None:
    """Add a parameter without elements to an optimizer that has none.

    0.19.2, with torch's Adam, reads the number of steps from a parameter's state. This fails on a rank that trains no
    parameter, such as one with only frozen layers. The added parameter is in no buffer and has no gradient.
    """
    groups = part.optimizer.param_groups
    if not any(group["params"] for group in groups):
        groups[0]["params"].append(torch.nn.Parameter(torch.zeros(0)))


def clip_gradients(optimizer: Any, norm: float) -> None:
    """Scale all gradients down to `clip_grad`, by their norm over all ranks."""
    for part in optimizer.chained_optimizers:
        parameters = [] if part.is_stub_optimizer else part.get_parameters()
        if parameters and part.config.clip_grad > 0:
            clip_grad_by_total_norm_fp32(
                parameters,
                part.config.clip_grad,
                norm,
                part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8,
            )


def replicas(expert: bool) -> list[int]:
    """Return the ranks that hold the same parameters as this one."""
    if expert:
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dist.get_process_group_ranks(group)


def _build(
    config: TransformerConfig, backend: Backend, family: Family, hf: PretrainedConfig, *, critic: bool
) -> list[GPTModel]:
    virtual = config.virtual_pipeline_model_parallel_size
    ranks = config.tensor_model_parallel_size
    chunks = []
    for stage in range(virtual or 1):
        vp_stage = stage if virtual else None
        where = {"ignore_virtual": virtual is None, "vp_stage": vp_stage}
        chunk = GPTModel(
            config,
            _block_spec(config, backend, family, vp_stage),
            vocab_size=-(-hf.vocab_size // ranks) * ranks,
            pre_process=parallel_state.is_pipeline_first_stage(**where),
            post_process=parallel_state.is_pipeline_last_stage(**where),
            vp_stage=vp_stage,
            **{**family.model(hf), **({"share_embeddings_and_output_weights": False} if critic else {})},
        )
        if critic and chunk.post_process:
            chunk.output_layer = ValueHead(config)
        if family.latent_epsilon is not None:
            for module in chunk.modules():
                if isinstance(module, MLASelfAttention | AbsorbedMLASelfAttention):
                    _set_epsilon(module, family.latent_epsilon)
        chunks.append(chunk.to(backend.device))
    return chunks


def _set_epsilon(attention: Any, epsilon: float) -> None:
    """Set the epsilon of the norms of an attention's latents; Megatron uses that of the layers' norms."""
    for name in ("linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm"):
        if (projection := getattr(attention, name, None)) is not None:
            projection.eps = epsilon


def _keep_biases_exact(chunks: Sequence[GPTModel]) -> None:
    """Keep the routers' biases in float32, before they are loaded: a rounded bias would choose other experts."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module._maintain_float32_expert_bias()


def _mark_bias(value: Any) -> None:
    """Correct the attributes of an expert's bias that control the reduction of its gradients.

    0.19.2, tensor_parallel.layers, treats it as if all tensor-parallel ranks held it, and sums its gradients over the
    ranks that share a sequence, though each has other experts.
    """
    value.sequence_parallel = False


def _let_gradients_through(chunks: Sequence[GPTModel], config: TransformerConfig) -> None:
    """Require a gradient at the output of a frozen embedding, where layers are recomputed.

    Megatron computes no gradients for the parameters of a recomputed layer whose input needs none.
    """
    if config.recompute_granularity is None:
        return
    for chunk in chunks:
        if chunk.pre_process and not chunk.embedding.word_embeddings.weight.requires_grad:
            chunk.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())


def _block_spec(
    config: TransformerConfig, backend: Backend, family: Family, vp_stage: int | None
) -> TransformerBlockSubmodules:
    first = get_transformer_layer_offset(config, vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage))
    specs = [backend.layer_spec(config, experts=has_experts(config, layer)) for layer in layers]
    for layer, spec in zip(layers, specs, strict=True):
        if spec.submodules.self_attention.module is MLASelfAttention:
            spec.submodules.self_attention.module = LatentAttention
        if config.linear_attention_freq is not None and config.linear_attention_freq[layer]:
            spec.submodules.self_attention = delta_net_spec(spec.submodules.self_attention.submodules)
        if family.whole_norms:
            spec.submodules.self_attention.module = WholeNormAttention
    if family.post_norms:
        add = ModuleSpec(PostNorm, params={"config": config, "norm": backend.norm})
        for spec in specs:
            spec.submodules.self_attn_bda = spec.submodules.mlp_bda = add
    return TransformerBlockSubmodules(specs, backend.norm)


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Return whether a layer, counted from 0, is a mixture of experts."""
    if config.num_moe_experts is None:
        return False
    pattern = config.moe_layer_freq
    return bool(pattern[layer]) if isinstance(pattern, list) else layer % pattern == 0
