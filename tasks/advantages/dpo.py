"""Direct preference optimization (Rafailov et al. 2023, "Direct Preference Optimization", equation 7), as a policy
gradient.

A group is a pair, the preferred sample y⁺, whose reward is 1, and the other one y⁻. With the margin

    m = log π(y⁺)/π_ref(y⁺) - log π(y⁻)/π_ref(y⁻)        sums over the trained tokens
    L = -(1 - ε) log σ(βm) - ε log σ(-βm)

where ε is `dpo_label_smoothing` (Mitchell 2023, "A note on DPO with noisy preferences", equation 3) and β `dpo_beta`,
the gradient of L in the log-prob of a token is the same for every token of a sample. It is the advantage, negated, and
the return is L:

    A = -∂L/∂ log π(y_t) = ± β (σ(-βm) - ε)              + for y⁺, - for y⁻

of the policy before the update, so a batch is one optimizer step. The samples of a pair need not meet in a micro-batch
or on a rank for that; the loss `dpo` follows.
"""

from collections.abc import Sequence

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch


@plugin(needs={"old_log_probs", "ref_log_probs"}, reads={"dpo_beta", "dpo_label_smoothing"}, loss="dpo")
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Of every token those of its sample."""
    margins = config.dpo_beta * _margins(batch)
    weights = config.dpo_beta * (np.exp(-np.logaddexp(0, margins)) - config.dpo_label_smoothing)
    advantages, returns = np.zeros(len(batch)), np.zeros(len(batch))
    for group, weight, loss in zip(batch.groups, weights, _losses(margins, config), strict=True):
        advantages[group] = weight * _signs(batch, group)
        returns[group] = loss
    return batch.spread(advantages), batch.spread(returns)


def preference_metrics(batch: ScoredBatch, config: AlgorithmConfig) -> dict[str, float]:
    """Means over the pairs, of the policy before the update; implicit rewards are β log π(y)/π_ref(y). Names as in
    TRL."""
    rewards, log_probs = config.dpo_beta * _log_ratios(batch), _sums(batch, batch.old_log_probs)
    chosen = batch.rewards > 0
    margins = config.dpo_beta * _margins(batch)
    return {
        "dpo/loss": float(_losses(margins, config).mean()),
        "dpo/rewards/chosen": float(rewards[chosen].mean()),
        "dpo/rewards/rejected": float(rewards[~chosen].mean()),
        "dpo/rewards/margins": float(margins.mean()),
        "dpo/rewards/accuracies": float((margins > 0).mean()),
        "dpo/logps/chosen": float(log_probs[chosen].mean()),
        "dpo/logps/rejected": float(log_probs[~chosen].mean()),
    }


def _losses(margins: np.ndarray, config: AlgorithmConfig) -> np.ndarray:
    """[P] of pairs, from βm."""
    smoothing = config.dpo_label_smoothing
    return (1 - smoothing) * np.logaddexp(0, -margins) + smoothing * np.logaddexp(0, margins)


def _margins(batch: ScoredBatch) -> np.ndarray:
    """[P] float64, of every pair."""
    ratios = _log_ratios(batch)
    return np.array([float(ratios[group] @ _signs(batch, group)) for group in batch.groups])


def _log_ratios(batch: ScoredBatch) -> np.ndarray:
    """[N] float64: log π(y)/π_ref(y) of every sample."""
    return _sums(batch, batch.old_log_probs) - _sums(batch, batch.ref_log_probs)


def _sums(batch: ScoredBatch, log_probs: Sequence[np.ndarray] | None) -> np.ndarray:
    """[N] float64: over the trained tokens of every sample."""
    assert log_probs is not None
    pairs = zip(log_probs, batch.loss_masks, strict=True)
    return np.array([float(values.astype(np.float64)[mask.astype(bool)].sum()) for values, mask in pairs])


def _signs(batch: ScoredBatch, group: slice) -> np.ndarray:
    """[2]: 1 of the preferred sample, -1 of the other. Raises ValueError for what is no pair."""
    rewards = batch.rewards[group]
    if sorted(rewards.tolist()) != [0, 1]:
        raise ValueError(f"a pair has a sample of reward 1 and one of reward 0, and here are {rewards.tolist()}")
    return np.where(rewards > 0, 1.0, -1.0)
