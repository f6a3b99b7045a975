"""Binding of a process to the CPUs beside its GPU, on machines with several NUMA nodes.

Copies between the host's memory and a GPU are slower through another processor's memory. Linux places a process's pages
beside the CPU that first writes them, so bound CPUs also bind pinned memory. SGLang's servers bind themselves
(SGLANG_AUTO_NUMA_BIND, on by default). slime: `nvmlDeviceSetCpuAffinity` in ray/train_actor.py:85.
"""

import os
from contextlib import suppress
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")
"""Folder in which Linux describes PCI devices."""

GPUS = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver describes GPUs, by PCI address."""


def bind_beside_gpu() -> None:
    """Bind this process to the CPUs beside its first GPU. Does nothing without a GPU, or where Linux reports no
    CPUs."""
    import torch

    if torch.cuda.is_available() and (address := address_of(str(torch.cuda.get_device_properties(0).uuid))):
        bind(address)


def address_of(uuid: str, gpus: Path = GPUS) -> str | None:
    """Return the PCI address of a GPU, such as 0000:3b:00.0; None where the driver does not tell.

    Args:
        uuid: id of the GPU, without "GPU-".
    """
    for information in gpus.glob("*/information"):
        with suppress(OSError):
            if f"GPU-{uuid}" in information.read_text():
                return information.parent.name
    return None


def bind(address: str, devices: Path = DEVICES) -> frozenset[int]:
    """Bind all threads of this process to those of their CPUs that are beside a PCI device, and return these; empty
    where there are none, and then nothing is bound.

    Args:
        address: PCI address.
    """
    try:
        beside = cpus_of((devices / address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    bound = beside & os.sched_getaffinity(0)
    if not bound:
        return frozenset()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended since
            os.sched_setaffinity(int(thread), bound)
    return frozenset(bound)


def cpus_of(text: str) -> frozenset[int]:
    """Return the CPUs in a list as Linux writes it: `0-3,8-11`."""
    parts = (part.partition("-") for part in text.strip().split(",") if part)
    return frozenset(cpu for first, _, last in parts for cpu in range(int(first), int(last or first) + 1))
