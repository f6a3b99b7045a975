"""Gated delta networks (Yang et al., 2024, arXiv:2412.06464) over packed sequences, in place of attention.

Megatron's own module takes packed sequences neither with `deterministic_mode` nor without the kernels of
flash-linear-attention, and divides heads over context-parallel ranks, of which there may then be no more than heads.
Parameters, their split over tensor-parallel ranks and their names in checkpoints are those of Megatron's module.
Sequences are independent: for each one the convolution starts with zeros, and so does the recurrent state.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import (
    GatedDeltaNet,
    GatedDeltaNetSubmodules,
    chunk_gated_delta_rule,
    torch_chunk_gated_delta_rule,
)
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from cairn.engines.training.megatron.packing import as_rows, context_order

_EPSILON = 1e-6
"""Epsilon of the length of queries and keys, as in the kernels that the models were trained with."""


class PackedDeltaNet(GatedDeltaNet):
    """Megatron's gated delta network, for packed sequences. With context parallelism every rank gathers all tokens."""

    def reset_parameters(self) -> None:
        """Do nothing: all parameters are loaded, so no initial value is used."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [T, 1, hidden] from the same shape, and no bias, with T this rank's tokens of all sequences."""
        mixed = self.in_proj(hidden_states)[0].squeeze(1)
        ends = packed_seq_params.cu_seqlens_q_padded
        lengths = (ends[1:] - ends[:-1]).tolist()
        group = self.pg_collection.cp
        size, rank = group.size(), group.rank()
        own = None
        if size > 1:
            everywhere = torch.cat([context_order(lengths, size, other) for other in range(size)]).to(ends.device)
            index = ends[everywhere[:, 0]] + everywhere[:, 1]
            own = index[rank * len(mixed) : (rank + 1) * len(mixed)]
            mixed = gather_from_sequence_parallel_region(mixed, group=group)[index.argsort()]
        outputs = self._mix(mixed, context_order(lengths, 1, 0).to(ends.device), ends)
        return self.out_proj((outputs if own is None else outputs[own]).unsqueeze(1))

    def _mix(self, mixed: torch.Tensor, places: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return [T, value heads * width] from the output of the input projection, whole sequences one after the other.

        Args:
            places: [T, 2] int64, sequence and position of every token.
            ends: [B + 1] int32, boundaries of the sequences.
        """
        keys, values = self.qk_dim // self.tp_size, self.v_dim // self.tp_size
        heads = self.num_value_heads // self.tp_size
        states, gate, beta, alpha = mixed.split([2 * keys + values, values, heads, heads], dim=-1)
        query, key, value = self._convolve(states, places[:, 1]).split([keys, keys, values], dim=-1)
        repeats = self.num_value_heads // self.num_key_heads
        query, key = (
            _unit(part.unflatten(-1, (-1, self.key_head_dim))).repeat_interleave(repeats, dim=1)
            for part in (query, key)
        )
        # In float32, as A is -inf in half precision.
        decay = -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias)
        operands = query, key, value.unflatten(-1, (-1, self.value_head_dim)), decay, beta.sigmoid()
        if mixed.device.type == "cpu" or self.config.deterministic_mode:
            rows = [as_rows(operand, places) for operand in operands]
            outputs = torch_chunk_gated_delta_rule(*rows[:3], g=rows[3], beta=rows[4])[0][places[:, 0], places[:, 1]]
        else:
            alone = [operand.unsqueeze(0) for operand in operands]
            outputs, _ = chunk_gated_delta_rule(*alone[:3], g=alone[3], beta=alone[4], cu_seqlens=ends.long())
            outputs = outputs.squeeze(0)
        gate = gate.unflatten(-1, (-1, self.value_head_dim))
        return self._apply_gated_norm(outputs, gate).view(len(mixed), -1)

    def _convolve(self, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return [T, channels]: each token's states and those of the few tokens before it in its sequence, weighted by
        channel."""
        weight = self.conv1d.weight.squeeze(1)
        last = self.conv_kernel_dim - 1
        outputs = states * weight[:, last]
        for back in range(1, min(last, len(states) - 1) + 1):
            before = F.pad(states[:-back], (0, 0, back, 0)) * (positions >= back).unsqueeze(1)
            outputs = outputs + before * weight[:, last - back]
        return F.silu(outputs)


class HeadNorm(torch.nn.RMSNorm):
    """Norm of each head's output. Its weight is not a deviation from 1, unlike in the model's other norms.

    The weight is the same on all tensor-parallel ranks, each of which has other heads, so its gradient is summed over
    them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, copy_to_tensor_model_parallel_region(self.weight), self.eps)


def delta_net_spec(attention: Any) -> ModuleSpec:
    """Return the specification of a gated delta network, built from the backend's modules.

    Args:
        attention: submodules of the self-attention that it replaces.
    """
    return ModuleSpec(
        module=PackedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=attention.linear_qkv, out_norm=HeadNorm, out_proj=attention.linear_proj
        ),
    )


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    return vectors * torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + _EPSILON)
