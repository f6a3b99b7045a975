"""How the next token is drawn: one uniform number a token, from the sample's seed and the token's position alone."""

import numpy as np
import torch


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[B] float32 in (0, 1], multiples of 2^-24: output `positions[b]` of the generator SplitMix64 seeded `seeds[b]`.

    A counter-based generator: any output without those before it, in integers only, so equal everywhere and in every
    batch. Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.

    Args:
        seeds: [B] uint64.
        positions: [B] uint64, of the token within its response, from 0.
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return ((z >> np.uint64(40)) + np.uint64(1)).astype(np.float32) * np.float32(2**-24)


def sample(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    temperature: torch.Tensor | None = None,
    greedy: torch.Tensor | None = None,
    truncated: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Draw a token a row by inverting the cumulative distribution, with its log-prob under what it was drawn from.

    Each row's result depends on that row alone.

    Args:
        logits: [B, V] float32.
        uniform: [B] in (0, 1].
        temperature: [B], positive; None where all are 1.
        greedy: [B] bool, rows that take the most probable token; None where none does.
        truncated: (rows [R], top_p [R], top_k [R]) of the rows, none of them greedy, that draw from a part of the
            vocabulary only; a top_k of V keeps all.

    Returns:
        tokens [B] int64; log-probs [B] float32 under softmax(logits / temperature), over the part alone in truncated
        rows; and the part [R, V] bool, the tokens that these rows could have drawn.
    """
    if temperature is not None:
        logits = logits / temperature[:, None]
    probs = torch.softmax(logits, dim=-1)
    candidates = probs
    if truncated is not None:
        rows, top_p, top_k = truncated
        part = _truncate(probs[rows], top_p, top_k)
        candidates = probs.index_copy(0, rows, part)
    cumulative = candidates.cumsum(-1)
    # A target in (0, total] is first reached at a token of positive probability.
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target).clamp_(max=logits.shape[-1] - 1)  # beyond the end if not finite
    if greedy is not None:
        tokens = torch.where(greedy[:, None], probs.argmax(-1, keepdim=True), tokens)
    chosen = probs.gather(1, tokens)[:, 0]
    if truncated is None:
        return tokens[:, 0], chosen.log(), None
    chosen = chosen.index_copy(0, rows, chosen[rows] / cumulative[rows, -1])
    return tokens[:, 0], chosen.log(), part > 0


def _truncate(probs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Zero all but the `top_k` most probable tokens, and of the full distribution all but the smallest set of the most
    probable tokens that holds `top_p` of the mass (Holtzman et al. 2020, "The curious case of neural text
    degeneration", section 3.1)."""
    descending, order = probs.sort(dim=-1, descending=True, stable=True)
    before = descending.cumsum(-1) - descending
    rank = torch.arange(probs.shape[-1], device=probs.device)
    keep = (before < top_p[:, None]) & (rank < top_k[:, None])
    return torch.zeros_like(probs).scatter_(1, order, descending * keep)
