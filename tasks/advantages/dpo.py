"""Direct preference optimization (Rafailov et al. 2023, "Direct Preference Optimization", equation 7), as a policy
gradient.

A group is a pair: the preferred sample y⁺ has reward 1, the other sample y⁻ reward 0. With the margin m and the loss L,

    m = log π(y⁺)/π_ref(y⁺) - log π(y⁻)/π_ref(y⁻)        sums over the trained tokens
    L = -(1 - ε) log σ(βm) - ε log σ(-βm)

where ε is `dpo_label_smoothing` (Mitchell 2023, "A note on DPO with noisy preferences", equation 3) and β is
`dpo_beta`, the gradient of L with respect to a token's log-prob is the same for every token of a sample. The advantage
is that gradient, negated, and the return is L:

    A = -∂L/∂ log π(y_t) = ± β (σ(-βm) - ε)              + for y⁺, - for y⁻

Both use the policy before the update, so a batch is one optimizer step. So the samples of a pair may be in different
micro-batches or on different ranks. The loss is `dpo`.
"""

from collections.abc import Sequence

import numpy as np

from cairn.configs.kinds import plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Advantages, ScoredBatch


@plugin(needs={"old_log_probs", "ref_log_probs"}, reads={"dpo_beta", "dpo_label_smoothing"}, loss="dpo")
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return advantages and returns: every token gets its sample's."""
    margins = config.dpo_beta * _margins(batch)
    weights = config.dpo_beta * (np.exp(-np.logaddexp(0, margins)) - config.dpo_label_smoothing)
    advantages, returns = np.zeros(len(batch)), np.zeros(len(batch))
    for group, weight, loss in zip(batch.groups, weights, _losses(margins, config), strict=True):
        advantages[group] = weight * _signs(batch, group)
        returns[group] = loss
    return batch.spread(advantages), batch.spread(returns)


def preference_metrics(batch: ScoredBatch, config: AlgorithmConfig) -> dict[str, float]:
    """Return means over the pairs, of the policy before the update. Implicit rewards are β log π(y)/π_ref(y). Names as
    in TRL."""
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
    """Return [P] losses of the pairs, from their βm."""
    smoothing = config.dpo_label_smoothing
    return (1 - smoothing) * np.logaddexp(0, -margins) + smoothing * np.logaddexp(0, margins)


def _margins(batch: ScoredBatch) -> np.ndarray:
    """Return [P] float64 margins m of the pairs."""
    ratios = _log_ratios(batch)
    return np.array([float(ratios[group] @ _signs(batch, group)) for group in batch.groups])


def _log_ratios(batch: ScoredBatch) -> np.ndarray:
    """Return [N] float64 log π(y)/π_ref(y) of the samples."""
    return _sums(batch, batch.old_log_probs) - _sums(batch, batch.ref_log_probs)


def _sums(batch: ScoredBatch, log_probs: Sequence[np.ndarray] | None) -> np.ndarray:
    """Return [N] float64 sums over the trained tokens of each sample."""
    assert log_probs is not None
    pairs = zip(log_probs, batch.loss_masks, strict=True)
    return np.array([float(values.astype(np.float64)[mask.astype(bool)].sum()) for values, mask in pairs])


def _signs(batch: ScoredBatch, group: slice) -> np.ndarray:
    """Return [2] signs: 1 for the preferred sample, -1 for the other. Raises ValueError where the group is no pair."""
    rewards = batch.rewards[group]
    if sorted(rewards.tolist()) != [0, 1]:
        raise ValueError(f"a pair must have rewards 1 and 0, but the rewards are {rewards.tolist()}")
    return np.where(rewards > 0, 1.0, -1.0)
