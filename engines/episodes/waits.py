"""How long samples waited for what others had, such as a process for a tool: that is not their own time."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.engines.trajectories import SampleKey


class Waits:
    """Of the samples of a loop."""

    def __init__(self) -> None:
        self._calls: Counter[SampleKey] = Counter()
        """That wait."""
        self._since: dict[SampleKey, float] = {}
        self._seconds: defaultdict[SampleKey, float] = defaultdict(float)

    @contextmanager
    def of(self, key: SampleKey) -> Iterator[None]:
        """A call of a sample waits meanwhile. Where several do at a time, that time counts once."""
        if not self._calls[key]:
            self._since[key] = time.monotonic()
        self._calls[key] += 1
        try:
            yield
        finally:
            self._calls[key] -= 1
            if not self._calls[key]:
                self._seconds[key] += time.monotonic() - self._since.pop(key)

    def seconds(self, key: SampleKey) -> float:
        """That a sample has waited in all."""
        since = self._since.get(key)
        return self._seconds[key] + (0.0 if since is None else time.monotonic() - since)
