"""Attention over the slots of a `KVCache`, as an attention function of transformers.

The library's own SDPA function copies keys and values once per query head as soon as a mask is given; here grouped
queries read them in place. Without a GPU rows of different lengths are attended to in segments
(`cairn.engines.rollout.transformers.segments`).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLOT_ATTENTION = "cairn_slots"
"""Its name in transformers, for `model.set_attn_implementation`."""


_given = threading.local()


@contextmanager
def segmented(segments: torch.Tensor) -> Iterator[None]:
    """Steps of this thread run over rows in these segments [K, 2]."""
    _given.segments = segments
    try:
        yield
    finally:
        del _given.segments


@torch.jit.script_if_tracing
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """As `F.scaled_dot_product_attention`, each segment over as many positions as it needs."""
    found: list[torch.Tensor] = []
    begin = 0
    for i in range(segments.shape[0]):
        end, length = int(segments[i, 0]), int(segments[i, 1])
        found.append(
            F.scaled_dot_product_attention(
                query[begin:end],
                key[begin:end, :, :length],
                value[begin:end, :, :length],
                attn_mask=mask[begin:end, :, :, :length],
                scale=scale,
                enable_gqa=grouped,
            )
        )
        begin = end
    return torch.cat(found)


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with queries [B, H, S, D] to keys and values [B, G, L, D] under a mask [B, 1, S, L] to be added to scores.

    Without a mask, for prompts, this is the library's own function.

    Returns:
        [B, S, H, D], and no attention weights.
    """
    if attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, None, scaling=scaling, **kwargs)
    group_size = int(getattr(module, "num_key_value_groups", 1))
    if group_size > 1 and query.is_cuda:
        # CUDA's fused kernels take a mask or grouped heads, not both: a group's heads become queries of one head.
        grouped = query.unflatten(1, (-1, group_size)).flatten(2, 3)
        mask = attention_mask.unsqueeze(2).expand(-1, -1, group_size, -1, -1).flatten(2, 3)
        mask = mask.expand(-1, grouped.shape[1], -1, -1)
        output = F.scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scaling)
        output = output.unflatten(2, (group_size, -1)).flatten(1, 2)
    else:
        segments: torch.Tensor | None = getattr(_given, "segments", None)
        if segments is None:  # a prompt, under the mask of a window
            segments = torch.tensor([(query.shape[0], key.shape[2])])
        output = _attend(query, key, value, attention_mask, segments, scaling, group_size > 1)
    return output.transpose(1, 2), None


AttentionInterface.register(SLOT_ATTENTION, slot_attention)
AttentionMaskInterface.register(SLOT_ATTENTION, sdpa_mask)
