"""Off-policy sequence masking.

DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models" (2025), section 3.1: a token does not
count if its advantage is negative and its response has become less probable by more than δ a token,

    1/|y| Σ_t (log π_old(y_t) - log π(y_t)) > opsm_delta

where π_old is the behaviour policy: its log-probs are those that the rollout engine returned, so that the lag of the
weights and what the two engines differ by count too.
"""

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, given


def masked(log_probs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig) -> torch.Tensor:
    """[T]: 1 at the tokens that do not count, 0 at the others. `log_probs`: [T], detached."""
    moved = tokens.of_tokens(tokens.means(tokens.behaviour - log_probs))
    return ((given(tokens.advantages) < 0) & (moved > algorithm.opsm_delta)).float()
