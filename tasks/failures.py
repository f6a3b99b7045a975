"""What samples failed of while they were generated, by name, for counting."""

import re
from collections import Counter

import pyarrow as pa

REFUSED = "refused"
"""By the engine, or for tokens that the model cannot take: such errors have no name."""
_NAMED = re.compile(r"(?:generate: )?([A-Z]\w+): ")


def failure_metrics(samples: pa.Table) -> dict[str, float]:
    """How many samples of a rollout table failed of what, each of its own."""
    counts = Counter(failure_name(error) for error in samples.column("error").to_pylist() if error is not None)
    return {f"failed/{name}": float(count) for name, count in sorted(counts.items())}


def failure_name(error: str) -> str:
    """Of the error of a sample: that of an exception, or of a deadline."""
    named = _NAMED.match(error)
    return REFUSED if named is None else named[1]
