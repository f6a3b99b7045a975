"""Memory and work of this machine's GPUs, from NVIDIA's management library."""

import socket
import threading
import time
from contextlib import suppress
from typing import Any

_LIFETIME = 1.0
"""Seconds for which a measurement counts as new."""


class Gpus:
    """The GPUs of this machine; none where the driver or the library is missing. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._library: Any = None
        self._measured: tuple[float, dict[str, Any]] = (float("-inf"), {})
        with suppress(Exception):
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml

    def measure(self) -> dict[str, Any]:
        """Return the machine's name and a dictionary for each GPU: memory in bytes, work as share of time."""
        with self._lock:
            at, known = self._measured
            if time.monotonic() - at > _LIFETIME:
                known = {"host": socket.gethostname(), "gpus": self._gpus()}
                self._measured = (time.monotonic(), known)
            return known

    def _gpus(self) -> list[dict[str, Any]]:
        found = []
        with suppress(Exception):  # a GPU may fall off the bus
            for index in range(self._library.nvmlDeviceGetCount() if self._library else 0):
                handle = self._library.nvmlDeviceGetHandleByIndex(index)
                memory = self._library.nvmlDeviceGetMemoryInfo(handle)
                work = self._library.nvmlDeviceGetUtilizationRates(handle)
                name = self._library.nvmlDeviceGetName(handle)
                found.append(
                    {
                        "index": index,
                        "name": name.decode() if isinstance(name, bytes) else name,
                        "used": memory.used,
                        "total": memory.total,
                        "utilization": work.gpu / 100,
                    }
                )
        return found
