"""Attention over a packed row: samples one after the other, none of which attends to another.

It is an attention function of transformers (`AttentionInterface`). The library passes queries, keys and values of a
layer to it, and makes no mask. PyTorch's own kernels attend within each sample, so memory does not grow with the square
of the row.

**Context parallelism.** Each of n ranks holds consecutive tokens of the row (`cairn.engines.training.packing`). Before
attention, one all-to-all exchange of queries, keys and values each leaves every rank with all tokens of an nth of the
heads; another one brings its output back (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509, section 3.1). All other
parts of a layer treat tokens one by one. The exchange's gradient is the opposite exchange. So the sum over ranks of the
gradients of their shares of the loss is the gradient of the loss.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from cairn.engines.models.folders import check_model_folder, model_class
from cairn.engines.types.errors import BadModel, EngineError

PACKED_ATTENTION = "cairn_packed"
"""Name of `packed_attention` in transformers."""
_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers, as in a config's `layer_types`, in which a token depends on others by attention alone."""
_SCALED_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the largest position of a forward pass."""


class Segments:
    """Samples of a packed row."""

    def __init__(self, lengths: Sequence[int], device: torch.device, group: dist.ProcessGroup | None) -> None:
        """
        Args:
            lengths: tokens of each sample, with padding, in the order of the row.
            group: the ranks that hold parts of the row; None where this rank holds all of it.
        """
        self.bounds = [0]
        for length in lengths:
            self.bounds.append(self.bounds[-1] + length)
        self.longest, self.group = max(lengths), group
        self.ends = torch.tensor(self.bounds, dtype=torch.int32, device=device)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model's language part attend within the samples of packed rows, in place.

    From then on its forward pass needs `segments`, the `Segments` of its row.
    """
    model.config.get_text_config()._attn_implementation = PACKED_ATTENTION


def packing_problems(path: str, ranks: int) -> Iterator[str]:
    """Yield sentences on why rows of a folder's model cannot be packed, or divided over ranks.

    Args:
        ranks: ranks that share each row.
    """
    try:
        config = check_model_folder(path)
    except BadModel:  # reported where folders are checked
        return
    for problem in model_problems(config, ranks):
        yield f"{problem} (model in {path})"


def model_problems(config: PretrainedConfig, ranks: int) -> Iterator[str]:
    """Yield these sentences for a model's config, or for that of its language part."""
    text, option = config.get_text_config(), "sequence_packing" if ranks == 1 else "context_parallel_size"
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    if why := _unpackable(config, text):
        yield f"training.{option} needs attention that keeps samples apart, and {why}: leave it out"
    elif ranks > 1 and not heads:
        yield f"training.context_parallel_size is {ranks}, but {text.model_type} has no number of heads: leave it out"
    elif ranks > 1 and heads % ranks:
        yield f"training.context_parallel_size is {ranks}, which must divide {heads} attention heads"


def _unpackable(config: PretrainedConfig, text: PretrainedConfig) -> str | None:
    """Return why a model's tokens depend on others in a way that `packed_attention` does not know; None if not so."""
    if others := {*(getattr(text, "layer_types", None) or ())} - _LAYERS:
        return f"{text.model_type} has layers of kind {', '.join(sorted(others))}"
    kind = model_class(config)._model_mapping.get(type(config), None)
    if kind is not None and (kind._is_stateful or not (kind._supports_attention_backend and kind._supports_flash_attn)):
        return f"that of {text.model_type} is its own"
    rotary = getattr(text, "rope_parameters", None) or {}
    if any(one.get("rope_type") in _SCALED_BY_LENGTH for one in (rotary, *rotary.values()) if isinstance(one, dict)):
        return f"{text.model_type} scales positions by the longest sample of a pass"
    if getattr(text, "attn_logit_softcapping", None):
        return f"that of {text.model_type} caps its scores"
    return None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    segments: Segments | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return [1, T, H, D] of the causal attention within each sample of a row, and no weights.

    Args:
        query: [1, H, T, D] of this rank's tokens, like `key` and `value` with their own numbers of heads and sizes.
        sliding_window: most recent tokens, its own included, that a token attends to; None: all.
        s_aux: [H] scores that take part in each softmax without a value, gpt-oss's sinks.

    Raises:
        EngineError: the model's layers do not pass on `segments`.
    """
    if segments is None:
        raise EngineError(
            f"{type(module).__name__} does not pass on the samples of a packed row: leave training.sequence_packing "
            "and training.context_parallel_size out"
        )
    group = segments.group
    if group is not None:
        ranks, heads = group.size(), key.shape[1]
        if heads % ranks:
            key, value = (each.repeat_interleave(ranks // gcd(heads, ranks), 1) for each in (key, value))
        query, key, value = (_exchanged(each, group) for each in (query, key, value))
        s_aux = None if s_aux is None else s_aux.chunk(ranks)[group.rank()]
    output = _within(query, key, value, segments, scaling, sliding_window, s_aux)
    return output if group is None else _exchanged(output, group), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _exchanged(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return [1, a / n, n b, c] from [1, a, b, c]: rank r gets the rth part of the first axis from every rank.

    Of heads and this rank's tokens it makes this rank's heads at all tokens; of tokens and this rank's heads, all heads
    at this rank's tokens.
    """
    by_rank = part.squeeze(0).unflatten(0, (group.size(), -1)).contiguous()
    return all_to_all_single_autograd(by_rank, None, None, group).transpose(0, 1).flatten(1, 2).unsqueeze(0)


def _within(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [1, T, H, D] of attention within samples whose tokens are all here."""
    size = query.shape[-1]
    fused = query.is_cuda and query.element_size() == 2 and sinks is None
    if fused and size == value.shape[-1] and size % 8 == 0 and size <= 256:
        return _fused(query, key, value, segments, scaling, window)
    parts = []
    for begin, end in pairwise(segments.bounds):
        step = end - begin if window is None else min(window, end - begin)
        for first in range(begin, end, step):
            last, start = min(first + step, end), begin if window is None else max(begin, first - window + 1)
            own, keys, values = query[:, :, first:last], key[:, :, start:last], value[:, :, start:last]
            parts.append(_attend(own, keys, values, scaling, None if start == first else window, sinks))
    return torch.cat(parts, 2).transpose(1, 2).contiguous()  # some models view it, as the library's own attention


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """Return [1, T, H, D] by PyTorch's kernel of CUDA for samples of different lengths."""
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (each.squeeze(0).transpose(0, 1) for each in (query, key, value))
    output = varlen_attn(
        query,
        key,
        value,
        segments.ends,
        segments.ends,
        segments.longest,
        segments.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(output, torch.Tensor)
    return output.unsqueeze(0)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [1, H, S, D] of queries [1, H, S, D], those of the last S of the keys' tokens."""
    if window is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    places = torch.arange(key.shape[2], device=query.device)
    age = places[-query.shape[2] :, None] - places
    mask = (age >= 0) & (age < (window or key.shape[2]))
    if sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    column = sinks.view(1, -1, 1, 1).expand(1, -1, query.shape[2], 1).to(scores.dtype)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return weights @ value
