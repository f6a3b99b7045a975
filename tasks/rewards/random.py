"""A coin, to try out everything except the grading. slime: `random`."""

import hashlib

from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> float:
    """Return 0 or 1, each with probability one half. Response and label determine it, so a second grading agrees."""
    return float(hashlib.sha256(f"{sample.label}\n{sample.response}".encode(errors="surrogatepass")).digest()[0] & 1)
