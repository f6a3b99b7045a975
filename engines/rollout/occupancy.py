"""Who has an engine: any number of samples that are generated, or one who changes its weights or its memory."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from cairn.engines.errors import EngineError


class Occupancy:
    """Of one engine. Nobody waits here: whoever comes too early is refused."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples = 0
        self._changes = False

    @property
    def generating(self) -> bool:
        """Whether samples are under way."""
        return self._samples > 0

    def enter(self, samples: int) -> None:
        """So many samples begin. Raises EngineError where the engine is changed."""
        with self._lock:
            if self._changes:
                raise EngineError("The engine's weights or memory are being changed: let that end before generating.")
            self._samples += samples

    def leave(self, samples: int) -> None:
        """So many samples have ended."""
        with self._lock:
            self._samples -= samples

    @contextmanager
    def alone(self, action: str) -> Iterator[None]:
        """Have the engine to oneself. Raises EngineError where it is in use."""
        with self._lock:
            if self._samples or self._changes:
                raise EngineError(f"The engine is generating: abort that call or let it end before you {action}.")
            self._changes = True
        try:
            yield
        finally:
            self._changes = False
