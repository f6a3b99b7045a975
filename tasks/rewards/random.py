"""A coin, for trying out everything but the grading. slime: `random`."""

import hashlib
from typing import Any


def grade(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """0 or 1, each half the time, fixed by the response and the label: grading again gives the same."""
    return float(hashlib.sha256(f"{label}\n{response}".encode(errors="surrogatepass")).digest()[0] & 1)
