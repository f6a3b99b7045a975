"""On-policy distillation: the teacher judges every token that the policy has sampled (Gu et al. 2024, "MiniLLM:
Knowledge Distillation of Large Language Models", section 2.1; Agarwal et al. 2024, "On-Policy Distillation of Language
Models").

    A_t ← A_t - opd_kl_coef · (log π(y_t) - log π_teacher(y_t))

The difference is a one-sample estimate of the reverse KL divergence of the policy from the teacher, in nats.
"""

from collections.abc import Sequence

import numpy as np


def reverse_kl(log_probs: Sequence[np.ndarray], teacher_log_probs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """[T_i] float32 of each sample: the policy's log-prob of each token less the teacher's."""
    return [policy - teacher for policy, teacher in zip(log_probs, teacher_log_probs, strict=True)]


def distil(
    advantages: Sequence[np.ndarray], divergences: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray], coef: float
) -> list[np.ndarray]:
    """Advantages lowered by `coef` times the divergence at trained tokens; the others are the environment's.

    All are [T_i] of each sample, the result float32.
    """
    return [
        (advantage - coef * divergence * mask.astype(bool)).astype(np.float32)
        for advantage, divergence, mask in zip(advantages, divergences, loss_masks, strict=True)
    ]
