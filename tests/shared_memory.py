"""Segments of shared memory that no process uses any more."""

import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

SEGMENTS = Path("/dev/shm")

MAKERS = ("nccl", "plasma", "ray", "torch")
"""Beginnings of the names that engines and Ray give; other programs leave segments too."""

WATCH = "CAIRN_TEST_WATCH"
"""Environment variable by which processes are known that were started under a watch."""


@contextmanager
def watched_segments() -> Iterator[Callable[[], set[str]]]:
    """Yields what gives the segments that came up under the watch and were left behind: no living process has them
    mapped, and whoever made them is not known to live, nor to have been started by anybody but the body.

    Other programs, concurrent tests among them, make and drop segments all the time.
    """
    before, watch, ended = segments(), uuid.uuid4().hex, threading.Event()
    foreign: set[str] = set()

    def note_foreign() -> None:
        seen = set(before)
        while not ended.wait(0.1):
            appeared = segments() - seen
            foreign.update(name for name in appeared if _is_made_outside(name, watch))
            seen |= appeared

    def left_behind(patience: float = 60.0) -> set[str]:
        end = time.monotonic() + patience
        while (left := {name for name in segments() - before - foreign if not _is_in_use(name)}) and (
            time.monotonic() < end
        ):
            time.sleep(0.2)
        return left

    noting = threading.Thread(target=note_foreign, daemon=True)
    noting.start()
    try:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv(WATCH, watch)
            yield left_behind
    finally:
        ended.set()
        noting.join()


def segments() -> set[str]:
    """Names of all that engines and Ray have made."""
    return {name for name in os.listdir(SEGMENTS) if name.startswith(MAKERS)}


def _maker(name: str) -> int | None:
    """The process that made it, where PyTorch did."""
    maker = re.match(r"torch_(\d+)_", name)
    return int(maker[1]) if maker else None


def _is_made_outside(name: str, watch: str) -> bool:
    maker = _maker(name)
    try:
        return maker is not None and psutil.Process(maker).environ().get(WATCH) != watch
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def _is_in_use(name: str) -> bool:
    maker = _maker(name)  # PyTorch keeps what it handed over until the receiver has it, or it ends
    if maker is not None and Path("/proc", str(maker)).exists():
        return True
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if str(SEGMENTS / name) in maps.read_text():
                return True
        except OSError:  # the process has ended meanwhile
            continue
    return False
