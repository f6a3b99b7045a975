"""Metric `mean`: the mean reward, where a failed sample counts as wrong.

A sample that could not be generated or graded counts as wrong. A policy's result includes the answers that cannot be
graded, and a mean over the others would rise with every one of them. Wrong is a reward of 0, or the lowest reward of
all if that is less: with a grader that pays -1 for a wrong answer, failing does not pay.
"""

from collections.abc import Sequence

import numpy as np

from cairn.tasks.grading.graded import GradedSample


def measure(samples: Sequence[GradedSample]) -> float:
    """Return the mean reward; 0 where all samples failed."""
    graded = np.asarray([sample.reward for sample in samples if sample.reward is not None], np.float64)
    if not len(graded):
        return 0.0
    wrong = min(0.0, float(graded.min()))
    failed = len(samples) - len(graded)
    return (float(graded.sum()) + failed * wrong) / len(samples)
