"""Metrics of a benchmark's graded samples. Each file has one metric, `measure(samples)`. It returns a number, the
benchmark's score, or a mapping with the score under `score` and any other metrics."""

import math
from collections.abc import Mapping, Sequence

from cairn.configs.kinds import BENCHMARK
from cairn.configs.plugins import BadPlugin
from cairn.tasks.grading.graded import GradedSample

SCORE = "score"
"""Name of the metric that is a benchmark's score."""


def measure(name: str, samples: Sequence[GradedSample]) -> dict[str, float]:
    """Return the metrics that a benchmark's `metric`, `name`, computes from its samples, question after question;
    `SCORE` is among them. Raises BadPlugin if it returns anything else."""
    returned = BENCHMARK.load(name)(samples)
    try:
        values = (
            {str(key): float(value) for key, value in returned.items()}
            if isinstance(returned, Mapping)
            else {SCORE: float(returned)}
        )
        fits = SCORE in values and all(map(math.isfinite, values.values()))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the benchmark metric {name!r} returned {returned!r}: let it return a number, or a mapping of names to "
            f"numbers with {SCORE!r} among them"
        )
    return values
