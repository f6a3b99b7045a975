"""Estimators of the KL divergence from the reference model, for sampled tokens."""

import torch

from cairn.configs.schema.algorithm import KLType
from cairn.engines.training.limits import LARGEST_LOG_RATIO, bounded


def kl_divergence(
    log_probs: torch.Tensor, ref_log_probs: torch.Tensor, kind: KLType, behaviour: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the [T] estimate for each token, in nats: J. Schulman, "Approximating KL Divergence" (2020).

    With d = log_probs - ref_log_probs, k1 = d, k2 = d² / 2 and k3 = exp(-d) - 1 + d, with d of the exponential clamped
    by `bounded`. `low_var_kl` is k3 limited to [-10, 10].

    Used as a loss over tokens that the policy π itself sampled, the expected gradients are: for k1 zero, since
    E[∇ log π] = 0; for k2 that of KL(π ‖ reference), which is E[d ∇ log π]; for k3 that of KL(reference ‖ π). Tang and
    Munos, "On a few pitfalls in KL divergence gradient estimation for RL" (2025).

    With log-probs of the behaviour policy μ, which sampled the tokens, the estimate is multiplied by π / μ, through
    which the gradient flows. For k1 and k3 the expectation over μ is then KL(π ‖ reference), and that of the gradient
    is its gradient, however far μ and π are apart. DeepSeek-AI, "DeepSeek-V3.2" (2025), section 3.1, "Unbiased KL
    estimate".
    """
    estimate = _estimate(log_probs - ref_log_probs, kind)
    if behaviour is not None:
        estimate = torch.exp(bounded(log_probs - behaviour)) * estimate
    return estimate.clamp(-10, 10) if kind == "low_var_kl" else estimate


def _estimate(difference: torch.Tensor, kind: KLType) -> torch.Tensor:
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # Where the exponential is clamped, the other term is too: alone, its gradient would push the policy further away.
    return torch.expm1(bounded(-difference)) + difference.clamp(min=-LARGEST_LOG_RATIO)
