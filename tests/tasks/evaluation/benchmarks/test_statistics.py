"""Estimates against their closed forms, and against enumeration."""

from itertools import combinations
from math import isclose, sqrt

import numpy as np
import pytest

from cairn.tasks.evaluation.benchmarks import measure
from cairn.tasks.evaluation.benchmarks.summary import majority_at_k, mean_and_error, pass_at_k, summary
from cairn.tasks.grading.graded import GradedSample


def arrays(*rows):
    return [np.asarray(row, np.float64) for row in rows]


def samples(*rows, answers=None):
    """One row a question; None is a sample that failed."""
    return [
        GradedSample(
            "",
            None,
            prompt_index=question,
            sample_index=index,
            reward=reward,
            components={} if answers is None else {"answer": answers[question][index]},
            error=None if reward is not None else "no",
            response_ids=() if reward is None else (0,) * 10 * (index + 1),
            finish_reason="length" if index == 0 else "stop",
        )
        for question, row in enumerate(rows)
        for index, reward in enumerate(row)
    ]


def test_the_error_of_one_sample_a_question_is_the_standard_error_of_the_mean():
    mean, error = mean_and_error(arrays([1], [0], [1], [1]))
    # Bernoulli: sqrt(p (1 - p) / (N - 1)) with p = 3/4 and N = 4.
    assert (mean, error) == (0.75, 0.25)


def test_the_error_of_equally_many_samples_is_that_of_the_questions_means():
    mean, error = mean_and_error(arrays([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]))
    assert mean == 0.5
    assert isclose(error, 0.5 / sqrt(3))  # means 1, 1/2, 0: standard deviation 1/2


def test_the_error_is_clustered_by_question():
    rows = arrays([1, 1, 0], [0, 0], [1], [1, 1, 1, 1])
    mean, error = mean_and_error(rows)
    every = np.concatenate(rows)
    assert isclose(mean, every.mean())
    # Miller 2024, eq. 4, with the variance of samples as 1/N² Σ (s - s̄)², and the correction for 4 clusters.
    within = sum((r[i] - mean) * (r[j] - mean) for r in rows for i in range(len(r)) for j in range(len(r)) if i != j)
    variance = ((every - mean) ** 2).sum() / len(every) ** 2 + within / len(every) ** 2
    assert isclose(error, sqrt(variance * 4 / 3))
    # Samples that agree within a question tell less than as many questions would.
    assert error > every.std(ddof=1) / sqrt(len(every))


def test_there_is_no_error_of_one_question():
    assert mean_and_error(arrays([1, 0])) == (0.5, None)


@pytest.mark.parametrize(
    ("n", "correct", "k"), [(1, 1, 1), (4, 1, 2), (5, 2, 3), (8, 3, 4), (6, 0, 3), (6, 6, 6), (7, 1, 7)]
)
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n, correct, k):
    subsets = list(combinations([1] * correct + [0] * (n - correct), k))
    assert isclose(pass_at_k(n, correct, k), sum(map(any, subsets)) / len(subsets))


def test_pass_at_k_of_many_samples_does_not_overflow():
    # 1 - C(9999, 100) / C(10000, 100) is 100 / 10000.
    assert isclose(pass_at_k(10_000, 1, 100), 0.01)
    with pytest.raises(ValueError, match="pass@5 cannot be estimated from 4"):
        pass_at_k(4, 1, 5)


@pytest.mark.parametrize(
    ("answers", "rewards", "k", "earned"),
    [
        (["7", "8", "7"], [1, 0, 1], 3, 1.0),
        (["7", "8", "8"], [1, 0, 0], 3, 0.0),
        (["7", "8", "8"], [1, 0, 0], 2, 0.5),  # a tie: either is taken equally often
        (["7", "8", "9"], [1, 0, 0], 3, 1 / 3),
        (["7", None, None], [1, 0, 0], 3, 1.0),  # no answer has no vote
        ([None, None], [0, 0], 2, 0.0),
        (["7"], [1], 1, 1.0),
    ],
)
def test_the_majority_earns_what_the_most_frequent_answer_does(answers, rewards, k, earned):
    assert isclose(majority_at_k(answers, rewards, k), earned)


def test_the_majority_of_more_samples_than_there_are_is_refused():
    with pytest.raises(ValueError, match="maj@3 cannot be estimated from 2"):
        majority_at_k(["7", "8"], [1, 0], 3)


def test_a_summary_counts_failed_samples_as_wrong_and_shows_them_apart():
    found = summary(samples([1, None, 1, 0], [0, 0, None, 0]))
    assert (found.questions, found.samples, found.n, found.failed) == (2, 8, 4, 2)
    assert found.score == 0.25
    assert isclose(found.standard_error, 0.25)  # means 1/2 and 0: sd √2/4, over √2
    assert found.interval == (0.0, pytest.approx(0.25 + 1.959964 * 0.25))
    assert found.pass_at == {1: 0.25, 2: pytest.approx((1 - 1 / 6) / 2), 4: 0.5}
    assert found.majority_at is None
    # Lengths and truncation are of what was generated.
    assert found.lengths is not None
    assert found.lengths.mean == (10 + 30 + 40 + 10 + 20 + 40) / 6
    assert found.lengths.p50 == 25
    assert found.truncated == 2 / 6


def test_a_summary_does_not_depend_on_the_order_of_the_samples():
    graded = samples([1, 0, 1], [0, 0, 1], answers=[["7", "8", "7"], ["8", "8", "7"]])
    assert summary(graded) == summary(graded[::-1])
    assert summary(graded).majority_at == {2: pytest.approx(0.25), 3: 0.5}


def test_pass_and_majority_are_of_rewards_that_are_right_or_wrong():
    found = summary(samples([0.5, 1], [-1, None], answers=[["7", "8"], ["7", "8"]]))
    assert (found.pass_at, found.majority_at) == (None, None)
    assert found.score == (0.5 + 1 - 1 - 1) / 4  # failed is as wrong as the worst


def test_the_metric_of_that_name_gives_the_same_numbers_to_a_run():
    found = measure("summary", samples([1, 0], [1, 1], answers=[["7", "8"], ["7", "7"]]))
    assert found["score"] == 0.75
    assert found["pass@2"] == 1.0
    assert found["maj@2"] == 0.75
    assert set(found) >= {"standard_error", "interval_low", "interval_high", "truncated", "response_len_p95", "failed"}
    assert measure("summary", samples([1]))["score"] == 1.0


def test_numbers_that_a_grader_tells_are_averaged_over_what_it_graded():
    graded = [
        GradedSample("", None, prompt_index=0, reward=1.0, components={"strict": 1.0, "answer": "7"}),
        GradedSample("", None, prompt_index=1, reward=1.0, components={"strict": 0.0, "answer": "7"}),
        GradedSample("", None, prompt_index=2, error="no"),
    ]
    assert summary(graded).components == {"strict": 0.5}
