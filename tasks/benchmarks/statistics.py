r"""Estimates from the samples of a benchmark, as functions of a matrix of rewards.

`rewards_QN` has a row a question and a column a sample, in float64; questions may have been asked different numbers of
times, and then come as a list of arrays.

| estimate | source |
|---|---|
| `mean_and_error` | Miller 2024, "Adding Error Bars to Evals" (arXiv:2411.00640), section 2.2 |
| `pass_at_k` | Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), eq. 1 |
| `majority_at_k` | Wang et al. 2022, "Self-Consistency" (arXiv:2203.11171) |
"""

from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


def mean_and_error(rewards_QN: Sequence[NDArray[np.float64]]) -> tuple[float, float | None]:
    r"""The mean over all samples, and its standard error, clustered by question: samples of one question are not
    independent, questions are.

    $\mathrm{SE} = \frac{1}{N} \sqrt{\frac{Q}{Q-1} \sum_q (\sum_i (s_{qi} - \bar s))^2}$, which is Miller's eq. 4 with
    the usual correction for few clusters, $Q/(Q-1)$: with one sample a question it is the standard error of the mean,
    with equally many it is that of the questions' means. None with fewer than two questions.
    """
    total = sum(map(len, rewards_QN))
    mean = float(sum(rewards.sum() for rewards in rewards_QN)) / total
    count = len(rewards_QN)
    if count < 2:
        return mean, None
    squares = sum(float((rewards - mean).sum()) ** 2 for rewards in rewards_QN)
    return mean, sqrt(squares * count / (count - 1)) / total


def interval(mean: float, error: float, questions: int, binary: bool) -> tuple[float, float]:
    """95 % confidence interval of a mean: 1.96 standard errors to either side; of rewards that are 0 or 1 no further
    than these. Where these are all the same, which leaves no error to go by, it is the exact one of as many independent
    questions (Clopper and Pearson 1934): 0 right of 30 is 0 to 0.116."""
    if not binary:
        return mean - Z95 * error, mean + Z95 * error
    if error == 0 and mean in (0.0, 1.0):
        reach = 1 - 0.025 ** (1 / questions)
        return (0.0, reach) if mean == 0 else (1 - reach, 1.0)
    return max(0.0, mean - Z95 * error), min(1.0, mean + Z95 * error)


def pass_at_k(n: int, correct: int, k: int) -> float:
    r"""Chance that of k samples, drawn without replacement from n of which `correct` are right, one is:
    $1 - \binom{n-c}{k} / \binom{n}{k}$, unbiased for $k \le n$. ValueError for another k."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    if n - correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def majority_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """What the most frequent answer among the first k samples earns.

    No answer (None) has no vote; without any vote it earns 0. Of answers that tie each is taken equally often: the
    result is the mean of what they earn. ValueError for another k than 1 to all.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} cannot be estimated from {len(answers)} samples")
    votes = Counter(answer for answer in answers[:k] if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    earned = [
        np.mean([reward for given, reward in zip(answers[:k], rewards[:k], strict=True) if given == answer])
        for answer, count in votes.items()
        if count == most
    ]
    return float(np.mean(earned))
