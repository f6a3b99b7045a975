"""CPU and wall-clock seconds of the parts of a piece of work. Needs only the standard library."""

import time


class Meter:
    """Measures from its creation on."""

    def __init__(self) -> None:
        self.cpu: dict[str, float] = {}
        """CPU seconds of this process, by part."""
        self.wall: dict[str, float] = {}
        """Wall-clock seconds, by part."""
        self._last = time.process_time(), time.perf_counter()

    def mark(self, part: str) -> None:
        """Assign the time since the last mark to this part."""
        now = time.process_time(), time.perf_counter()
        self.cpu[part], self.wall[part] = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
