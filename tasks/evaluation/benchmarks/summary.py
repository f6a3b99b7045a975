"""Metric `summary`: the figures of a benchmark, with confidence intervals, pass@k and maj@k.

A sample that could not be generated or graded counts as wrong, as in the metric `mean`, and is also counted separately.
pass@k and maj@k exist for rewards of 0 and 1 only. k is 1, 2, 4, … up to the number of samples that every question has,
and that number itself.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import sqrt

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from cairn.tasks.grading.graded import GradedSample

# Estimates from rewards in float64. `rewards_QN` has one row per question and one column per sample. Questions with
# different numbers of samples come as a list of arrays.


Z95 = 1.959963984540054
"""97.5 % quantile of the standard normal distribution."""


def mean_and_error(rewards_QN: Sequence[NDArray[np.float64]]) -> tuple[float, float | None]:
    r"""Return the mean over all samples, and its standard error, clustered by question: samples of one question are not
    independent, questions are. The error is None with fewer than two questions.

    $\mathrm{SE} = \frac{1}{N} \sqrt{\frac{Q}{Q-1} \sum_q (\sum_i (s_{qi} - \bar s))^2}$. This is eq. 4 of Miller 2024,
    "Adding Error Bars to Evals" (arXiv:2411.00640), section 2.2, with the usual correction for few clusters, $Q/(Q-1)$.
    With one sample a question it is the standard error of the mean, with equally many samples that of the questions'
    means.
    """
    total = sum(map(len, rewards_QN))
    mean = float(sum(rewards.sum() for rewards in rewards_QN)) / total
    count = len(rewards_QN)
    if count < 2:
        return mean, None
    squares = sum(float((rewards - mean).sum()) ** 2 for rewards in rewards_QN)
    return mean, sqrt(squares * count / (count - 1)) / total


def interval(mean: float, error: float, questions: int, binary: bool) -> tuple[float, float]:
    """Return the 95 % confidence interval of a mean: 1.96 standard errors to either side, clipped to [0, 1] for rewards
    that are 0 or 1.

    If these are all equal, the standard error is 0. The interval is then the exact one of as many independent questions
    (Clopper and Pearson 1934): 0 right of 30 gives 0 to 0.116.
    """
    if not binary:
        return mean - Z95 * error, mean + Z95 * error
    if error == 0 and mean in (0.0, 1.0):
        reach = 1 - 0.025 ** (1 / questions)
        return (0.0, reach) if mean == 0 else (1 - reach, 1.0)
    return max(0.0, mean - Z95 * error), min(1.0, mean + Z95 * error)


def pass_at_k(n: int, correct: int, k: int) -> float:
    r"""Return the probability that at least one of k samples is right, drawn without replacement from n of which
    `correct` are right.

    It is $1 - \binom{n-c}{k} / \binom{n}{k}$, unbiased for $k \le n$: Chen et al. 2021, "Evaluating Large Language
    Models Trained on Code" (arXiv:2107.03374), eq. 1. Raises ValueError for another k.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples")
    if n - correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - correct + 1, n + 1)))


def majority_at_k(answers: Sequence[str | None], rewards: Sequence[float], k: int) -> float:
    """Return the reward of the most frequent answer among the first k samples: Wang et al. 2022, "Self-Consistency"
    (arXiv:2203.11171).

    A missing answer (None) has no vote; without any vote the reward is 0. Tied answers are chosen equally often: the
    result is the mean of their rewards. Raises ValueError for a k outside 1 to all samples.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"maj@{k} cannot be estimated from {len(answers)} samples")
    votes = Counter(answer for answer in answers[:k] if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    earned = [
        np.mean([reward for vote, reward in zip(answers[:k], rewards[:k], strict=True) if vote == answer])
        for answer, count in votes.items()
        if count == most
    ]
    return float(np.mean(earned))


class Lengths(BaseModel):
    """Lengths of responses, in tokens."""

    model_config = ConfigDict(frozen=True)

    mean: float
    p50: float
    p95: float


class Summary(BaseModel):
    """Figures of one benchmark on one weight version."""

    model_config = ConfigDict(frozen=True)

    questions: int
    samples: int
    n: int
    """Smallest number of samples of a question."""
    score: float
    """avg@n: the mean reward of all samples, failed ones counted as wrong."""
    standard_error: float | None
    """Standard error of the score, clustered by question; None with one question."""
    interval: tuple[float, float] | None
    """95 % confidence interval of the score; None with one question."""
    pass_at: dict[int, float] | None
    """Unbiased pass@k by k; None where rewards are not 0 or 1."""
    majority_at: dict[int, float] | None
    """maj@k by k, above 1; None where rewards are not 0 or 1, or the grader reports no `answer`."""
    failed: int
    """Samples that could not be generated or graded."""
    truncated: float
    """Share of the responses that were cut at the longest length allowed."""
    lengths: Lengths | None
    """Lengths of the generated responses; None where nothing was generated."""
    components: dict[str, float]
    """Means of the numbers that the grader reports in addition to the reward, over the graded samples."""

    def metrics(self) -> dict[str, float]:
        """Return the figures by name, without unknown ones."""
        figures: dict[str, float | None] = {"score": self.score, "standard_error": self.standard_error}
        if self.interval is not None:
            figures |= {"interval_low": self.interval[0], "interval_high": self.interval[1]}
        figures |= {f"pass@{k}": value for k, value in (self.pass_at or {}).items()}
        figures |= {f"maj@{k}": value for k, value in (self.majority_at or {}).items()}
        figures |= {"failed": self.failed, "truncated": self.truncated}
        if self.lengths is not None:
            figures |= {f"response_len_{name}": value for name, value in self.lengths.model_dump().items()}
        figures |= self.components
        return {name: float(value) for name, value in figures.items() if value is not None}


def measure(samples: Sequence[GradedSample]) -> Mapping[str, float]:
    """Return the benchmark metric `summary`."""
    return summary(samples).metrics()


def summary(samples: Sequence[GradedSample]) -> Summary:
    """Return the summary of samples, which may be in any order. Raises ValueError without samples."""
    if not samples:
        raise ValueError("a benchmark without samples has no summary")
    wrong = min(0.0, *(sample.reward or 0.0 for sample in samples), 0.0)
    ordered = sorted(samples, key=lambda sample: (sample.question, sample.index))
    questions = [list(group) for _, group in groupby(ordered, key=lambda sample: sample.question)]
    rewards_QN = [
        np.asarray([wrong if sample.reward is None else sample.reward for sample in group], np.float64)
        for group in questions
    ]
    score, error = mean_and_error(rewards_QN)
    n = min(map(len, questions))
    binary = all(np.isin(rewards, (0.0, 1.0)).all() for rewards in rewards_QN)
    generated = [sample for sample in samples if sample.error is None or sample.length]
    return Summary(
        questions=len(questions),
        samples=len(samples),
        n=n,
        score=score,
        standard_error=error,
        interval=None if error is None else interval(score, error, len(questions), binary),
        pass_at=_pass_at(rewards_QN, n) if binary else None,
        majority_at=_majority_at(questions, rewards_QN, n) if binary else None,
        failed=sum(sample.reward is None for sample in samples),
        truncated=float(np.mean([sample.truncated for sample in generated])) if generated else 0.0,
        lengths=_lengths([sample.length for sample in generated]),
        components=_components(samples),
    )


def _ks(n: int) -> list[int]:
    return sorted({n, *(2**power for power in range(n.bit_length()) if 2**power <= n)})


def _pass_at(rewards_QN: Sequence[NDArray[np.float64]], n: int) -> dict[int, float]:
    return {
        k: float(np.mean([pass_at_k(len(rewards), int(rewards.sum()), k) for rewards in rewards_QN])) for k in _ks(n)
    }


def _majority_at(
    questions: Sequence[Sequence[GradedSample]], rewards_QN: Sequence[NDArray[np.float64]], n: int
) -> dict[int, float] | None:
    if not any("answer" in sample.components for group in questions for sample in group):
        return None
    answers = [[_answer(sample) for sample in group] for group in questions]
    return {
        k: float(np.mean([majority_at_k(votes, list(r), k) for votes, r in zip(answers, rewards_QN, strict=True)]))
        for k in _ks(n)
        if k > 1
    }


def _answer(sample: GradedSample) -> str | None:
    answer = sample.components.get("answer")
    return None if answer is None else str(answer)


def _lengths(lengths: Sequence[int]) -> Lengths | None:
    if not lengths:
        return None
    p50, p95 = np.percentile(np.asarray(lengths, np.float64), (50, 95))
    return Lengths(mean=float(np.mean(lengths)), p50=float(p50), p95=float(p95))


def _components(samples: Sequence[GradedSample]) -> dict[str, float]:
    graded = [sample.components for sample in samples if sample.reward is not None]
    names = dict.fromkeys(name for own in graded for name, value in own.items() if _is_number(value))
    return {
        name: float(np.mean([own[name] for own in graded if _is_number(own.get(name))]))
        for name in names
        if name != "answer"
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
