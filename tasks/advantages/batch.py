"""What an advantage estimator is given, and what it returns."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig

# The trained tokens of a batch, of all samples one after the other, and sums over what follows in each sample.
#
# No sample is padded to the length of another: a batch takes memory for its tokens, however uneven they are, and the
# sums of all samples are taken together, from the last token of each to the first.


class TrainedTokens:
    """M tokens of N samples; a sample may have none."""

    def __init__(self, loss_masks: Sequence[np.ndarray]) -> None:
        """`loss_masks`: [T_i] of each sample, 1 at trained tokens."""
        self._lengths = np.array([len(mask) for mask in loss_masks], np.int64)
        self._trained = np.concatenate([np.zeros(0, bool), *(mask.astype(bool) for mask in loss_masks)])
        of_tokens = np.repeat(np.arange(len(loss_masks)), self._lengths)
        self.samples = of_tokens[self._trained]
        """[M]: the sample of each."""
        self.counts = np.bincount(self.samples, minlength=len(loss_masks))
        """[N]: how many each sample has."""
        self.ending = np.flatnonzero(self.counts)
        """Samples that have some …"""
        self.last = np.cumsum(self.counts)[self.ending] - 1
        """… and the last of each, as a place among the M."""

    def of(self, fields: Sequence[np.ndarray]) -> np.ndarray:
        """[T_i] of each sample → [M] float64."""
        return np.concatenate([np.zeros(0), *fields])[self._trained].astype(np.float64)

    def spread(self, values: np.ndarray) -> list[np.ndarray]:
        """[M] → [T_i] float32 of each sample, 0 at tokens that are not trained on."""
        whole = np.zeros(len(self._trained), np.float32)
        whole[self._trained] = values
        ends = np.cumsum(self._lengths).tolist()
        return [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def following(self, values: np.ndarray) -> np.ndarray:
        """[M] → [M]: that of the next trained token of the sample, 0 after its last."""
        moved = np.append(values[1:], np.zeros(min(1, len(values))))
        moved[self.last] = 0
        return moved

    def discounted(self, values: np.ndarray, factor: float) -> np.ndarray:
        """[M] → [M] float64: S_t = x_t + factor · S_{t+1} within each sample, nothing after its last token."""
        longest_first = np.argsort(-self.counts, kind="stable")
        rank = np.empty_like(longest_first)
        rank[longest_first] = np.arange(len(rank))
        # Column k has the k-th token from the end of every sample that is so long, the longest samples first.
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
    """Behind its last token, of those of the response."""
    reward: float | None = None
    """That user code gave it while it generated."""


@dataclass(frozen=True)
class ScoredBatch:
    """The N samples of an iteration, group after group, T_i response tokens each. Trajectories of one sample whose
    rewards differ stand in it as samples: see `cairn.tasks.advantages.step`.

    Fields of tokens hold an array [T_i] for each sample. Those that are scored are None unless the estimator needs
    them.
    """

    rewards: np.ndarray
    """[N]."""
    group_sizes: Sequence[int]
    """Samples of each group, in their order; they add up to N."""
    loss_masks: Sequence[np.ndarray]
    """1 at the tokens that are trained on, 0 at those that the world gave."""
    rollout_log_probs: Sequence[np.ndarray] | None = None
    """Of the rollout engine."""
    old_log_probs: Sequence[np.ndarray] | None = None
    """Of the policy before the update, as the loss has them."""
    ref_log_probs: Sequence[np.ndarray] | None = None
    """Of the reference model."""
    teacher_log_probs: Sequence[np.ndarray] | None = None
    """Of the teacher."""
    values: Sequence[np.ndarray] | None = None
    """Of the critic before the update."""
    kl: Sequence[np.ndarray] | None = None
    """Estimates of the divergence from the reference model, float64; None unless `kl_coef` is positive."""
    truncated: np.ndarray | None = None
    """[N] bool: whether the response was cut at the longest length allowed."""
    turns: Sequence[Sequence[Turn]] | None = None
    """The turns of each sample, in order; between them stand the tokens that the world gave. What the advantage step
    makes has them always."""
    siblings: np.ndarray | None = None
    """[N] int: the same number for those that are one sample's, which count as one sample in their group together. None
    where each is a sample by itself."""
    components: Sequence[Mapping[str, Any]] | None = None
    """[N]: what the grader said of each, by its names (`cairn.tasks.grading.shaping`). None unless the estimator
    needs them; with them every sample stands here whole, since they are the sample's and not a trajectory's."""

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
        """The samples of each group."""
        return itertools.starmap(slice, itertools.pairwise([0, *itertools.accumulate(self.group_sizes)]))

    @property
    def siblings_of_groups(self) -> Iterator[np.ndarray | None]:
        """`siblings` of each group."""
        return (None if self.siblings is None else self.siblings[group] for group in self.groups)

    def spread(self, per_sample: Sequence[float] | np.ndarray) -> list[np.ndarray]:
        """[N] numbers → [T_i] float32 of each sample: every token has its sample's."""
        return [np.full(len(mask), value, np.float32) for value, mask in zip(per_sample, self.loss_masks, strict=True)]

    def token_rewards(self, tokens: TrainedTokens, kl_coef: float) -> np.ndarray:
        """[M] float64 of the trained tokens: `-kl_coef` times the KL divergence at each, and the sample's reward more
        at its last. The reward of a sample without a trained token is nobody's."""
        rewards = np.zeros(len(tokens.samples))
        if kl_coef > 0:
            assert self.kl is not None
            rewards -= kl_coef * tokens.of(self.kl)
        rewards[tokens.last] += self.rewards[tokens.ending]
        return rewards


Advantages = tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
"""Advantages and returns, [T_i] float32 of each sample. Returns are what a critic learns; where there is none they are
only recorded."""


class Estimator(Protocol):
    """From rewards to advantages: a pure function."""

    def __call__(self, batch: ScoredBatch, config: AlgorithmConfig, /) -> Advantages:
        """The advantages and returns of a batch."""


# Advantages of one scale, whatever the scale of rewards.


EPSILON = 1e-8
"""Added to the variance, as in slime."""


def normalise(advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(A - mean) / sqrt(variance + 1e-8), mean and unbiased variance over the trained tokens of all samples; 0 at all
    other tokens.

    Args:
        advantages: [T_i] float32 of each sample.
        loss_masks: [T_i], 1 at trained tokens.
    """
    tokens = TrainedTokens(loss_masks)
    trained = tokens.of(advantages)
    # As for the rewards of a group: equal numbers, and one alone, must not be blown up by a rounding error.
    if not trained.size or np.ptp(trained) == 0:
        return tokens.spread(np.zeros_like(trained))
    mean, scale = trained.mean(), 1 / np.sqrt(trained.var(ddof=1) + EPSILON)
    return tokens.spread((trained - mean) * scale)
