"""Memory and work of this machine's GPUs, from NVIDIA's management library."""

import socket
import threading
from contextlib import suppress
from functools import cache
from typing import Any

from cachetools import TTLCache, cached

_LIFETIME = 1.0
"""Seconds for which a measurement counts as new."""


@cached(TTLCache(1, _LIFETIME), lock=threading.Lock())
def measure() -> dict[str, Any]:
    """Return the machine's name and a dictionary for each GPU: memory in bytes, work as share of time. No GPUs where
    the driver or the library is missing. Thread-safe."""
    gpus = []
    with suppress(Exception):  # a GPU may fall off the bus
        nvml = _library()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            name = nvml.nvmlDeviceGetName(handle)
            gpus.append(
                {
                    "index": index,
                    "name": name.decode() if isinstance(name, bytes) else name,
                    "used": memory.used,
                    "total": memory.total,
                    "utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                }
            )
    return {"host": socket.gethostname(), "gpus": gpus}


@cache
def _library() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml
