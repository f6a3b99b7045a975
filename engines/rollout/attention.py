"""Attention of single new tokens over the slots of a `KVCache`, as an attention function of transformers.

The library's own SDPA function copies keys and values once per query head as soon as a mask is given; here grouped
queries read them in place.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLOT_ATTENTION = "cairn_slots"
"""Its name in transformers, for `model.set_attn_implementation`."""


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with one query a row ([B, H, 1, D] over [B, G, L, D]); longer queries, prompts, go to the library's SDPA.

    Returns:
        [B, 1, H, D], and no attention weights.
    """
    if query.shape[2] > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    groups = key.shape[1]
    if query.is_cuda and query.shape[1] != groups:
        # CUDA's fused kernels take a mask or grouped heads, not both: a group's heads become queries of one head.
        grouped = query.view(query.shape[0], groups, -1, query.shape[3])
        mask = None if attention_mask is None else attention_mask.expand(-1, groups, grouped.shape[2], -1)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling).view(query.shape)
    else:
        output = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=query.shape[1] != groups
        )
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
