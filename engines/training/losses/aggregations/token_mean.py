"""Σ_i Σ_t l_it / Σ_i c_i: the mean over all tokens (DAPO, Yu et al. 2025, section 3.3)."""

from collections.abc import Sequence

from cairn.configs.schema.algorithm import AlgorithmConfig


def weigh(counts: Sequence[int], groups: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """Every token counts the same."""
    return [1 / sum(counts)] * len(counts)
