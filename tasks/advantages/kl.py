"""Estimators of the KL divergence from the reference model, of sampled tokens, for rewards."""

import numpy as np

from configs.schema.algorithm import KLType


def kl_divergence(log_probs: np.ndarray, ref_log_probs: np.ndarray, kind: KLType) -> np.ndarray:
    """[T] float64 estimate for each token, in nats; see `engines.training.losses.kl` for the formulas."""
    difference = log_probs.astype(np.float64) - ref_log_probs
    if kind == "k1":
        return difference
    if kind == "k2":
        return np.square(difference) / 2
    k3 = np.expm1(-difference) + difference
    return np.clip(k3, -10, 10) if kind == "low_var_kl" else k3
