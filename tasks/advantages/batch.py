"""What an advantage estimator is given, and what it returns."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.tokens import TrainedTokens


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
    rewards differ stand in it as samples: see `cairn.tasks.advantages.trajectories`.

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
    """[N]: what the grader said of each, by its names (`cairn.tasks.rewards.components`). None unless the estimator
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
