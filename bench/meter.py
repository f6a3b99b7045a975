"""CPU and wall seconds of the parts of a piece of work. Needs the standard library alone."""

import time


class Meter:
    """Counts from its making on."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        """Seconds of this process, by part."""
        self.wall: dict[str, float] = {}
        """Seconds on the clock, by part."""
        self._last = time.process_time(), time.perf_counter()

    def mark(self, part: str) -> None:
        """Count what passed since the last mark as this part's."""
        now = time.process_time(), time.perf_counter()
        self.cpu[part], self.wall[part] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
