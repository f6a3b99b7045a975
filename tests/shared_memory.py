"""Segments of shared memory that nobody uses any more."""

import os
import re
import time
from pathlib import Path

SEGMENTS = Path("/dev/shm")

MAKERS = ("nccl", "plasma", "ray", "torch")
"""Beginnings of the names that engines and Ray give; other programs leave segments too."""


def orphans_since(before: set[str], patience: float = 20.0) -> set[str]:
    """Names of segments that are not among `before`, that no living process has mapped and whose maker is not known to
    live, `patience` seconds on.

    Other programs make and drop segments all the time, so one that is in use is not anybody's left-over.
    """
    end = time.monotonic() + patience
    while (found := {name for name in segments() - before if not _is_in_use(name)}) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def segments() -> set[str]:
    """Names of all that engines and Ray have made."""
    return {name for name in os.listdir(SEGMENTS) if name.startswith(MAKERS)}


def _is_in_use(name: str) -> bool:
    maker = re.match(r"torch_(\d+)_", name)  # PyTorch keeps what it handed over until the receiver has it, or it ends
    if maker and Path("/proc", maker[1]).exists():
        return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(SEGMENTS / name) in maps.read_text():
                return True
        except OSError:  # the process has ended meanwhile
            continue
    return False
