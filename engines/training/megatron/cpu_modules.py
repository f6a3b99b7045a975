"""The modules of a transformer layer on the CPU, under the names that Transformer Engine gives their parameters.

Import this only where `cairn.engines.training.megatron.cpu.install` has been called.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_context_parallel_group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from cairn.engines.training.megatron.packing import as_rows, context_order


class Norm(torch.nn.RMSNorm):
    """Megatron's own wrapper of it refuses sequence parallelism, for which the weight only has to be marked: its
    gradients are then added up over the ranks that share a sequence."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self._config = config
        _mark(self.weight, config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _normalised(x, self.weight, self._config, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """A norm and the linear layer after it, as Transformer Engine's LayerNormLinear: `layer_norm_weight`, `weight`."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        _mark(self.layer_norm_weight, config)

    def forward(self, input_: torch.Tensor, *args: Any, **options: Any) -> Any:
        normalised = _normalised(input_, self.layer_norm_weight, self.config, self.config.layernorm_epsilon)
        return super().forward(normalised, *args, **options)


class Attention(torch.nn.Module):
    """Causal attention over packed sequences. With context parallelism every rank gathers all keys and values.

    Megatron's DotProductAttention, the only one without a GPU, knows neither.
    """

    def __init__(self, config: TransformerConfig, *_: Any, **options: Any) -> None:
        super().__init__()
        self._scale = options.get("softmax_scale")
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
        """[T, heads * head_dim] from [T, heads, head_dim]: T are this rank's tokens of all sequences."""
        size, rank = self._group.size(), self._group.rank()
        ends = packed_seq_params.cu_seqlens_q_padded
        lengths = (ends[1:] - ends[:-1]).tolist()
        places = everywhere = context_order(lengths, size, rank)
        mask = None
        if size > 1:
            everywhere = torch.cat([context_order(lengths, size, other) for other in range(size)])
            key, value = (gather_from_sequence_parallel_region(x.contiguous(), group=self._group) for x in (key, value))
            positions = places[:, 1]
            places = context_order([length // size for length in lengths], 1, 0)
            last_seen = as_rows(positions, places)
            mask = (torch.arange(max(lengths)) <= last_seen[..., None])[:, None]
        outputs = F.scaled_dot_product_attention(
            as_rows(query, places).transpose(1, 2),
            as_rows(key, everywhere).transpose(1, 2),
            as_rows(value, everywhere).transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return outputs.transpose(1, 2)[places[:, 0], places[:, 1]].flatten(1)


def _normalised(x: torch.Tensor, weight: torch.Tensor, config: TransformerConfig, eps: float | None) -> torch.Tensor:
    if config.layernorm_zero_centered_gamma:
        return F.rms_norm(x.float(), weight.shape, weight.float() + 1, eps).type_as(x)
    return F.rms_norm(x, weight.shape, weight, eps)


def _mark(weight: torch.nn.Parameter, config: TransformerConfig) -> None:
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CpuSpecProvider(LocalSpecProvider):
    """Which module stands where, as Megatron asks for it."""

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return NormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
        return Norm

    def core_attention(self) -> type:
        return Attention


def layer_spec(config: TransformerConfig, feed_forward: ModuleSpec) -> ModuleSpec:
    """A layer in the shape of `get_gpt_layer_with_transformer_engine_spec`: norms are part of the linear layers that
    follow them, except before experts."""
    norm = Norm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=NormColumnParallelLinear,
                    core_attention=Attention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=norm,
                    k_layernorm=norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=Norm if feed_forward.module is MoELayer else IdentityOp,
            mlp=feed_forward,
            mlp_bda=get_bias_dropout_add,
        ),
    )
