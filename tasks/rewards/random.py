"""A coin, for trying out everything but the grading. slime: `random`."""

import hashlib

from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> float:
    """0 or 1, each half the time, fixed by the response and the label: grading again gives the same."""
    return float(hashlib.sha256(f"{sample.label}\n{sample.response}".encode(errors="surrogatepass")).digest()[0] & 1)
