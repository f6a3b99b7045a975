"""What the samples of a benchmark come to.

A sample that could not be generated or graded counts as wrong, as in the metric `mean`, and is counted apart too.
pass@k and maj@k are of rewards that are 0 or 1, for k = 1, 2, 4, … up to the number of samples that every question has,
and for that.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from cairn.tasks.benchmarks.sample import EvaluatedSample
from cairn.tasks.benchmarks.statistics import interval, majority_at_k, mean_and_error, pass_at_k


class Lengths(BaseModel):
    """Of responses, in tokens."""

    model_config = ConfigDict(frozen=True)

    mean: float
    p50: float
    p95: float


class Summary(BaseModel):
    """The figures of one benchmark on one weight version."""

    model_config = ConfigDict(frozen=True)

    questions: int
    samples: int
    n: int
    """Samples that every question has at least."""
    score: float
    """avg@n: the mean reward of all samples, failed ones counted as wrong."""
    standard_error: float | None
    """Of the score, clustered by question; None with one question."""
    interval: tuple[float, float] | None
    """95 % confidence interval of the score; None with one question."""
    pass_at: dict[int, float] | None
    """Unbiased pass@k by k; None where rewards are not 0 or 1."""
    majority_at: dict[int, float] | None
    """maj@k by k, above 1; None where rewards are not 0 or 1, or the grader tells no `answer`."""
    failed: int
    """Samples that could not be generated or graded."""
    truncated: float
    """Share of the responses that were cut at the longest length allowed."""
    lengths: Lengths | None
    """None where nothing was generated."""
    components: dict[str, float]
    """Means of the numbers that the grader tells beside the reward, over the graded samples."""

    def metrics(self) -> dict[str, float]:
        """The same as names and numbers, without what is not known."""
        found: dict[str, float | None] = {"score": self.score, "standard_error": self.standard_error}
        if self.interval is not None:
            found |= {"interval_low": self.interval[0], "interval_high": self.interval[1]}
        found |= {f"pass@{k}": value for k, value in (self.pass_at or {}).items()}
        found |= {f"maj@{k}": value for k, value in (self.majority_at or {}).items()}
        found |= {"failed": self.failed, "truncated": self.truncated}
        if self.lengths is not None:
            found |= {f"response_len_{name}": value for name, value in self.lengths.model_dump().items()}
        found |= self.components
        return {name: float(value) for name, value in found.items() if value is not None}


def measure(samples: Sequence[EvaluatedSample]) -> Mapping[str, float]:
    """The benchmark metric `summary`."""
    return summary(samples).metrics()


def summary(samples: Sequence[EvaluatedSample]) -> Summary:
    """What samples come to, in any order. ValueError where there are none."""
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
    questions: Sequence[Sequence[EvaluatedSample]], rewards_QN: Sequence[NDArray[np.float64]], n: int
) -> dict[int, float] | None:
    if not any("answer" in (sample.components or {}) for group in questions for sample in group):
        return None
    answers = [[_answer(sample) for sample in group] for group in questions]
    return {
        k: float(np.mean([majority_at_k(given, list(r), k) for given, r in zip(answers, rewards_QN, strict=True)]))
        for k in _ks(n)
        if k > 1
    }


def _answer(sample: EvaluatedSample) -> str | None:
    answer = (sample.components or {}).get("answer")
    return None if answer is None else str(answer)


def _lengths(lengths: Sequence[int]) -> Lengths | None:
    if not lengths:
        return None
    p50, p95 = np.percentile(np.asarray(lengths, np.float64), (50, 95))
    return Lengths(mean=float(np.mean(lengths)), p50=float(p50), p95=float(p95))


def _components(samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    graded = [sample.components or {} for sample in samples if sample.reward is not None]
    names = dict.fromkeys(name for found in graded for name, value in found.items() if _is_number(value))
    return {
        name: float(np.mean([found[name] for found in graded if _is_number(found.get(name))]))
        for name in names
        if name != "answer"
    }


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)
