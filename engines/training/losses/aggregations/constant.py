"""1/N Σ_i 1/C Σ_t l_it, with C = `loss_scale_factor`: the mean over samples of the sum over their tokens, by a constant
(Dr. GRPO, Liu et al. 2025, section 3.1)."""

from collections.abc import Sequence

from cairn.configs.schema.algorithm import AlgorithmConfig


def weigh(counts: Sequence[int], groups: Sequence[int], config: AlgorithmConfig) -> list[float]:
    """A token counts the same in a short response and in a long one."""
    assert config.loss_scale_factor is not None
    return [1 / (len(counts) * config.loss_scale_factor)] * len(counts)
