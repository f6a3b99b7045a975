"""What becomes of a benchmark's graded samples. One metric a file, `measure(samples)`: a number, the benchmark's score,
or a mapping with it under `score` and whatever other metrics there are."""

import math
from collections.abc import Mapping, Sequence

from cairn.configs.kinds import BENCHMARK
from cairn.configs.plugins import BadPlugin
from cairn.tasks.evaluation.benchmarks.sample import EvaluatedSample

__all__ = ["SCORE", "EvaluatedSample", "measure"]

SCORE = "score"
"""The metric that a benchmark is known by."""


def measure(name: str, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    """What `metric` of a benchmark, `name`, says of its samples, question after question; `SCORE` is among it. Raises
    BadPlugin if it returns anything else."""
    found = BENCHMARK.load(name)(samples)
    try:
        values = (
            {str(key): float(value) for key, value in found.items()}
            if isinstance(found, Mapping)
            else {SCORE: float(found)}
        )
        fits = SCORE in values and all(map(math.isfinite, values.values()))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the benchmark metric {name!r} returned {found!r}: let it return a number, or a mapping of names to "
            f"numbers with {SCORE!r} among them"
        )
    return values
