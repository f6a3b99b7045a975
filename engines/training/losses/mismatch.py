"""How far trainer and rollout engine are apart, under the names of slime's mismatch helper."""

import torch

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.collate import Tokens, given
from cairn.engines.training.losses.limits import bounded


def mismatch(log_probs: torch.Tensor, tokens: Tokens, algorithm: AlgorithmConfig) -> dict[str, torch.Tensor]:
    """[T] each, of which the means are recorded. With ρ_t = exp(trainer - rollout), of a token, and means over the T
    trained tokens of a response y:

    | metric | |
    |---|---|
    | mis_kl, mis_k3_kl | -log ρ_t and ρ_t - 1 - log ρ_t: estimates of KL(rollout ‖ trainer) |
    | mis_training_log_ppl, mis_training_ppl | -1/T log π(y) by the trainer, and its exponential |
    | mis_rollout_log_ppl, mis_rollout_ppl | the same by the rollout engine |
    | mis_log_ppl_diff, mis_log_ppl_abs_diff | 1/T Σ_t -log ρ_t, and its absolute value |
    | mis_ppl_ratio | exp(1/T Σ_t -log ρ_t) |
    | mis_chi2_token, mis_chi2_seq | ρ_t² - 1 and (Π_t ρ_t)² - 1: estimates of χ²(trainer ‖ rollout) |
    | mis_outside | 1 where ρ_t is outside of tis_clip_low and tis_clip |

    Exponents are held within `limits`.

    Args:
        log_probs: [T] of the trainer, detached.
    """
    rollout = given(tokens.rollout_log_probs)
    log_ratios = log_probs - rollout

    def of_responses(values: torch.Tensor) -> torch.Tensor:
        return tokens.of_tokens(tokens.means(values))

    training_ppl, rollout_ppl, apart = map(of_responses, (-log_probs, -rollout, -log_ratios))
    whole = tokens.of_tokens(tokens.sums(log_ratios))
    ratios = torch.exp(bounded(log_ratios))
    outside = (ratios < algorithm.tis_clip_low) | (ratios > algorithm.tis_clip)
    return {
        "mis_kl": -log_ratios,
        "mis_k3_kl": torch.expm1(bounded(log_ratios)) - log_ratios,
        "mis_training_log_ppl": training_ppl,
        "mis_training_ppl": torch.exp(bounded(training_ppl)),
        "mis_rollout_log_ppl": rollout_ppl,
        "mis_rollout_ppl": torch.exp(bounded(rollout_ppl)),
        "mis_log_ppl_diff": apart,
        "mis_log_ppl_abs_diff": apart.abs(),
        "mis_ppl_ratio": torch.exp(bounded(apart)),
        "mis_chi2_token": ratios.square() - 1,
        "mis_chi2_seq": torch.exp(2 * bounded(whole)) - 1,
        "mis_outside": outside.float(),
    }
