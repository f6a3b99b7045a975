"""How the next token is drawn: one uniform number a token, from the sample's seed and the token's position alone."""

import torch

_GOLDEN = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 and the two below as signed 64-bit integers
_MIX_1 = -0x40A7B892E31B1A47
_MIX_2 = -0x6B2FB644ECCEEE15


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[B] float32 in (0, 1], multiples of 2^-24: output `positions[b]` of the generator SplitMix64 seeded `seeds[b]`.

    A counter-based generator: any output without those before it, in integers only, so equal on every device and in
    every batch. Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        seeds: [B] int64.
        positions: [B] int64, of the token within its response, from 0.
    """
    z = seeds + (positions + 1) * _GOLDEN
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return (_shift_right(z, 40) + 1).to(torch.float32) * 2.0**-24


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token a row by inverting the cumulative distribution, with its log-prob before truncation.

    Each row's result depends on that row alone.

    Args:
        logits: [B, V] float32.
        uniform: [B] in (0, 1].
        temperature: [B], positive; None where all are 1.
        greedy: [B] bool, rows that take the most probable token; None where none does.
        truncated: (rows [R], top_p [R], top_k [R]) of the rows that draw from a part of the vocabulary only; top_k of V
            or more keeps all.

    Returns:
        tokens [B] int64; log-probs [B] float32 under softmax(logits / temperature).
    """
    if temperature is not None:
        logits = logits / temperature[:, None]
    probs = torch.softmax(logits, dim=-1)
    candidates = probs
    if truncated is not None:
        rows, top_p, top_k = truncated
        candidates = probs.index_copy(0, rows, _truncate(probs[rows], top_p, top_k))
    cumulative = candidates.cumsum(-1)
    # A target in (0, total] is first reached at a token of positive probability.
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target).clamp_(max=logits.shape[-1] - 1)
    if greedy is not None:
        tokens = torch.where(greedy[:, None], probs.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], probs.gather(1, tokens)[:, 0].log()


def _truncate(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k` most probable tokens, and of the full distribution all but the smallest set of the most
    probable tokens that holds `top_p` of the mass (Holtzman et al. 2020, "The curious case of neural text
    degeneration", section 3.1)."""
    descending, order = probs.sort(dim=-1, descending=True, stable=True)
    before = descending.cumsum(-1) - descending
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & (rank < top_k[:, None])
    return torch.zeros_like(probs).scatter_(1, order, descending * keep)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of signed integers."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
