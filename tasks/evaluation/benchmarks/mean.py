"""The mean reward, a sample that failed counted as wrong.

A sample that could not be generated or graded counts as wrong: what a policy makes of a benchmark includes the answers
that nobody can grade, and a mean over the others would rise with every one of them. Wrong is a reward of 0, or the
lowest of all where that is less: with a grader that pays -1 for a wrong answer it does not pay to fail.
"""

from collections.abc import Sequence

import numpy as np

from cairn.tasks.evaluation.benchmarks.sample import EvaluatedSample


def measure(samples: Sequence[EvaluatedSample]) -> float:
    """0 where all failed."""
    graded = np.asarray([sample.reward for sample in samples if sample.reward is not None], np.float64)
    if not len(graded):
        return 0.0
    wrong = min(0.0, float(graded.min()))
    failed = len(samples) - len(graded)
    return (float(graded.sum()) + failed * wrong) / len(samples)
