"""Input and output of an advantage estimator."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig

# The trained tokens of all samples of a batch, concatenated, and sums within each sample. Nothing is padded: a batch
# needs memory only for its tokens, however uneven they are. The sums of all samples run together, from each sample's
# last token backwards.


class TrainedTokens:
    """M trained tokens of N samples; a sample may have none."""

    def __init__(self, loss_masks: Sequence[np.ndarray]) -> None:
        """Find the trained tokens. `loss_masks`: [T_i] of each sample, 1 at trained tokens."""
        self._lengths = np.array([len(mask) for mask in loss_masks], np.int64)
        self._trained = np.concatenate([np.zeros(0, bool), *(mask.astype(bool) for mask in loss_masks)])
        of_tokens = np.repeat(np.arange(len(loss_masks)), self._lengths)
        self.samples = of_tokens[self._trained]
        """[M] sample of each token."""
        self.counts = np.bincount(self.samples, minlength=len(loss_masks))
        """[N] number of tokens of each sample."""
        self.ending = np.flatnonzero(self.counts)
        """Samples that have trained tokens."""
        self.last = np.cumsum(self.counts)[self.ending] - 1
        """Index among the M of the last token of each sample in `ending`."""

    def of(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """Select the trained tokens: [T_i] of each sample → [M] float64."""
        return np.concatenate([np.zeros(0), *fields])[self._trained].astype(np.float64)

    def spread(self, values: np.ndarray) -> list[np.ndarray]:
        """Return [M] values as [T_i] float32 of each sample, 0 at tokens that are not trained on."""
        whole = np.zeros(len(self._trained), np.float32)
        whole[self._trained] = values
        ends = np.cumsum(self._lengths).tolist()
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def following(self, values: np.ndarray) -> np.ndarray:
        """Return [M] values shifted: each token gets that of its sample's next trained token, 0 after the last."""
        moved = np.append(values[1:], np.zeros(min(1, len(values))))
        moved[self.last] = 0
        return moved

    def discounted(self, values: np.ndarray, factor: float) -> np.ndarray:
        """Return [M] float64 discounted sums S_t = x_t + factor · S_{t+1} within each sample, 0 after its last
        token."""
        longest_first = np.argsort(-self.counts, kind="stable")
        rank = np.empty_like(longest_first)
        rank[longest_first] = np.arange(len(rank))
        # Column k has the k-th token from the end of every sample of more than k tokens, the longest samples first.
        widths = np.searchsorted(np.sort(-self.counts), -np.arange(self.counts.max(initial=0)), side="left")
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
        from_end = np.cumsum(self.counts)[self.samples] - 1 - np.arange(len(self.samples))
        places = starts[from_end] + rank[self.samples]
        columns = np.empty(len(values))
        columns[places] = values
        for later, start, width in zip(starts, starts[1:], widths[1:], strict=False):
            columns[start : start + width] += factor * columns[later : later + width]
        return columns[places]


@dataclass(frozen=True)
class Turn:
    """Tokens that the policy sampled at once."""

    start: int
    end: int
    """Index after its last token, among the tokens of the response."""
    reward: float | None = None
    """Reward that user code gave the turn during generation; None without one."""


@dataclass(frozen=True)
class ScoredBatch:
    """N samples of an iteration, group after group, with T_i response tokens each. Trajectories of one sample whose
    rewards differ are separate samples here: see `cairn.tasks.advantages.step`.

    Fields of tokens have an array [T_i] for each sample. Scored fields are None unless the estimator needs them.
    """

    rewards: np.ndarray
    """[N] rewards."""
    group_sizes: Sequence[int]
    """Number of samples of each group, in order; the sum is N."""
    loss_masks: Sequence[np.ndarray]
    """[T_i] masks: 1 at tokens that are trained on, 0 at those of the environment."""
    rollout_log_probs: Sequence[np.ndarray] | None = None
    """[T_i] log-probs of the rollout engine."""
    old_log_probs: Sequence[np.ndarray] | None = None
    """[T_i] log-probs of the policy before the update, as in the loss."""
    ref_log_probs: Sequence[np.ndarray] | None = None
    """[T_i] log-probs of the reference model."""
    teacher_log_probs: Sequence[np.ndarray] | None = None
    """[T_i] log-probs of the teacher."""
    values: Sequence[np.ndarray] | None = None
    """[T_i] values of the critic before the update."""
    kl: Sequence[np.ndarray] | None = None
    """[T_i] float64 estimates of the divergence from the reference model; None unless `kl_coef` is positive."""
    truncated: np.ndarray | None = None
    """[N] bool: whether the response was cut off at the maximum length."""
    turns: Sequence[Sequence[Turn]] | None = None
    """Turns of each sample, in order; tokens of the environment are between them. Always set by the advantage step."""
    siblings: np.ndarray | None = None
    """[N] int: equal numbers for entries of one sample, which together count as one sample in their group. None where
    each entry is a sample by itself."""
    components: Sequence[Mapping[str, Any]] | None = None
    """[N] rewards and components of each sample, by name (`cairn.tasks.grading.shaping`). None unless the estimator
    needs them. With them every entry is a whole sample: they belong to the sample, and not to a trajectory."""

    def __post_init__(self) -> None:
        if sum(self.group_sizes) != len(self.rewards) or len(self.loss_masks) != len(self.rewards):
            raise ValueError(
                f"there are {len(self.rewards)} rewards for {len(self.loss_masks)} samples in groups of "
                f"{list(self.group_sizes)}"
            )

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def groups(self) -> Iterator[slice]:
        """Slice of the samples of each group."""
        return itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(self.group_sizes)]))

    def by_group(self, rewards: np.ndarray, function: "GroupFunction") -> np.ndarray:
        """Return [N] results of a function of the [N] rewards, group by group."""
        siblings = (None if self.siblings is None else self.siblings[group] for group in self.groups)
        results = [function(rewards[group], own) for group, own in zip(self.groups, siblings, strict=True)]
        return np.concatenate(results)

    def spread(self, per_sample: Sequence[float] | np.ndarray) -> list[np.ndarray]:
        """Return [N] numbers as [T_i] float32 of each sample: every token gets its sample's number."""
        return [np.full(len(mask), value, np.float32) for value, mask in zip(per_sample, self.loss_masks, strict=True)]

    def token_rewards(self, tokens: TrainedTokens, kl_coef: float) -> np.ndarray:
        """Return [M] float64 rewards of the trained tokens: `-kl_coef` times the KL divergence at each, plus the
        sample's reward at its last one. Samples without trained tokens contribute no reward."""
        rewards = np.zeros(len(tokens.samples))
        if kl_coef > 0:
            assert self.kl is not None
            rewards -= kl_coef * tokens.of(self.kl)
        rewards[tokens.last] += self.rewards[tokens.ending]
        return rewards


GroupFunction = Callable[[np.ndarray, np.ndarray | None], np.ndarray]
"""Function of the [G] rewards of one group, and its `siblings`, that returns [G] numbers."""

Advantages = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
"""Advantages and returns, [T_i] float32 of each sample. A critic learns the returns; without one they are only
recorded."""


class Estimator(Protocol):
    """A pure function from rewards to advantages."""

    def __call__(self, batch: ScoredBatch, config: AlgorithmConfig, /) -> Advantages:
        """Return the advantages and returns of a batch."""


# Whitening: advantages on one scale, whatever the scale of the rewards.


EPSILON = 1e-8
"""Term added to the variance, as in slime."""


def normalise(advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return (A - mean) / sqrt(variance + 1e-8) at trained tokens, 0 at all others.

    Mean and unbiased variance are over the trained tokens of all samples. If all are equal, all results are 0.

    Args:
        advantages: [T_i] float32 of each sample.
        loss_masks: [T_i], 1 at trained tokens.
    """
    tokens = TrainedTokens(loss_masks)
    trained = tokens.of(advantages)
    # A division by almost zero would inflate the rounding errors of equal numbers, as in the rewards of a group.
    if not trained.size or np.ptp(trained) == 0:
        return tokens.spread(np.zeros_like(trained))
    mean, scale = trained.mean(), 1 / np.sqrt(trained.var(ddof=1) + EPSILON)
    return tokens.spread((trained - mean) * scale)
