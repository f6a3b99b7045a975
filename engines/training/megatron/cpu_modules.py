"""Modules of a transformer layer on the CPU, with the parameter names of Transformer Engine."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.experimental_attention_variant import absorbed_mla
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from cairn.engines.training.megatron.packing import as_rows, context_order


class Norm(torch.nn.RMSNorm):
    """RMSNorm that permits sequence parallelism, which Megatron's own wrapper rejects.

    The weight only has to be marked: its gradients are then summed over the ranks that share a sequence.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._config = config
        _mark(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(x, self.weight, self._config, self.eps)


class LayerNorm(torch.nn.LayerNorm):
    """LayerNorm in the form that Megatron builds it, without gradients over ranks that share a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear layer after it, like Transformer Engine's LayerNormLinear.

    Parameters are `layer_norm_weight` and `weight`.
    """

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.eps = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        _mark(self.layer_norm_weight, config)

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        normalised = _normalised(input_, self.layer_norm_weight, self.config, self.eps)
        return super().forward(normalised, *args, **options)


class ReplicatedLinear(torch.nn.Linear):
    """A linear layer that is whole on every tensor-parallel rank, like Transformer Engine's "duplicated" Linear."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        _mark(self.weight, config)

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


# Latent attention recognises by this class that its projections to latents are whole on every rank.
multi_latent_attention.TELinear = absorbed_mla.TELinear = ReplicatedLinear


class ExpertRowLinear(RowParallelLinear):
    """Second layer of an expert, without a reduction where one rank has the whole layer.

    Megatron adds the bias to the result in place, which PyTorch forbids on the result of a reduction.
    """

    def __init__(self, *sizes: Any, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.explicit_expert_comm = True  # the dispatcher reduces


class Attention(torch.nn.Module):
    """Causal attention over packed sequences, with sliding window and learnt softmax offset where the model has them.

    With context parallelism every rank gathers all keys and values. Megatron's DotProductAttention, the only one
    without a GPU, supports neither packed sequences nor context parallelism.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **options: Any) -> None:
        super().__init__()
        self._scale = options.get("softmax_scale")
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self._window = config.window_size[0] if windowed and config.window_size else None
        """Number of earlier tokens that a token attends to; None for all."""
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset: Any = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            offset.tensor_model_parallel, offset.partition_dim, offset.partition_stride = True, 0, 1
            self.softmax_offset = offset
        collection = options.get("pg_collection")
        self._group = get_context_parallel_group() if collection is None else collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """Return [T, heads * head_dim] from [T, heads, head_dim], with T this rank's tokens of all sequences."""
        size, rank = self._group.size(), self._group.rank()
        ends = packed_seq_params.cu_seqlens_q_padded
        lengths = (ends[1:] - ends[:-1]).tolist()
        places = everywhere = context_order(lengths, size, rank)
        positions = places[:, 1]
        if size > 1:
            everywhere = torch.cat([context_order(lengths, size, other) for other in range(size)])
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self._group) for x in (key, value))
            places = context_order([length // size for length in lengths], 1, 0)
        query, key, value = (
            as_rows(x, at).transpose(1, 2) for x, at in ((query, places), (key, everywhere), (value, everywhere))
        )
        mask = None
        if size > 1 or self._window is not None or self.softmax_offset is not None:
            mask = self._seen(as_rows(positions, places), max(lengths))
        if self.softmax_offset is not None:
            key, value, mask = self._with_offset(key, value, mask, query.dtype)
        outputs = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return outputs.transpose(1, 2)[places[:, 0], places[:, 1]].flatten(1)

    def _seen(self, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Return [sequences, 1, queries, keys] bool: the keys visible to queries at positions [sequences, queries]."""
        back = positions[..., None] - torch.arange(longest)
        seen = back >= 0 if self._window is None else (back >= 0) & (back <= self._window)
        return seen[:, None]

    def _with_offset(
        self, key: torch.Tensor, value: torch.Tensor, seen: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return keys and values with one more entry of zeros, and a mask that adds the offset to its logit.

        The extra key takes its share of the softmax, and its value is zero.
        """
        offset: Any = self.softmax_offset
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)
        sequences, _, queries, _ = mask.shape
        mask = torch.cat(
            [
                mask.expand(-1, len(offset), -1, -1),
                offset.to(dtype).view(1, -1, 1, 1).expand(sequences, -1, queries, 1),
            ],
            dim=-1,
        )
        return F.pad(key, (0, 0, 0, 1)), F.pad(value, (0, 0, 0, 1)), mask

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return what a checkpoint holds of this module; Megatron calls this on every module."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets)


def _normalised(x: torch.Tensor, weight: torch.Tensor, config: TransformerConfig, eps: float | None) -> torch.Tensor:
    if config.layernorm_zero_centered_gamma:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).type_as(x)
    return F.rms_norm(x, weight.shape, weight, eps)


def _mark(weight: Any, config: TransformerConfig) -> None:
    weight.sequence_parallel = config.sequence_parallel


class CpuSpecProvider(LocalSpecProvider):
    """Modules of a layer on the CPU, in the form that Megatron requests them."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> type:
        return Norm if rms_norm else LayerNorm

    def linear(self) -> type:
        return ReplicatedLinear

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=ExpertRowLinear)
        return partial(SequentialMLP, submodules=layers)

    def core_attention(self) -> type:
        return Attention


def layer_spec(config: TransformerConfig, *, experts: bool) -> ModuleSpec:
    """Return a layer in the form of `get_gpt_layer_with_transformer_engine_spec`.

    Norms are part of the linear layers that follow them, except before experts and latents.
    """
    latent = config.multi_latent_attention
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=Norm if latent else IdentityOp,
            self_attention=_self_attention(config),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm if experts else IdentityOp,
            mlp=get_mlp_module_spec_for_backend(
                CpuSpecProvider(), num_experts=config.num_moe_experts if experts else None
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _self_attention(config: TransformerConfig) -> ModuleSpec:
    if config.experimental_attention_variant == "dsa":
        return get_dsa_module_spec_for_backend(config, CpuSpecProvider())
    return _latent_attention() if config.multi_latent_attention else _attention(config)


def _attention(config: TransformerConfig) -> ModuleSpec:
    norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=NormColumnParallelLinear,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _latent_attention() -> ModuleSpec:
    return ModuleSpec(
        module=MLASelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=ReplicatedLinear,
            linear_q_up_proj=NormColumnParallelLinear,
            linear_kv_down_proj=ReplicatedLinear,
            linear_kv_up_proj=NormColumnParallelLinear,
            core_attention=Attention,
            linear_proj=RowParallelLinear,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
