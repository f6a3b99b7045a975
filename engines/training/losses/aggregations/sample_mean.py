"""1/N Σ_i 1/c_i Σ_t l_it: the mean over samples of the mean over a sample's tokens (GRPO, Shao et al. 2024)."""

from collections.abc import Sequence

from cairn.configs.schema.algorithm import AlgorithmConfig


def weigh(counts: Sequence[int], groups: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """A sample without trained tokens counts as one whose loss is 0."""
    return [1 / (len(counts) * max(count, 1)) for count in counts]
