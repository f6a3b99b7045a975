"""Estimators of the KL divergence from the reference model, of sampled tokens."""

import torch

from configs.schema.algorithm import KLType


def kl_divergence(log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLType) -> torch.Tensor:
    """[T] estimate for each token, in nats: J. Schulman, "Approximating KL Divergence" (2020).

    With d = log_probs - ref_log_probs, k1 = d, k2 = d² / 2 and k3 = exp(-d) - 1 + d. `low_var_kl` is k3 limited to
    [-10, 10].
    """
    difference = log_probs - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    k3 = torch.expm1(-difference) + difference
    return k3.clamp(-10, 10) if kind == "low_var_kl" else k3
