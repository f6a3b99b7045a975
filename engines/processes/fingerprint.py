"""The environment of a process, as far as it changes bits: measured in the process, and part of every commit."""

import os
import platform
import socket
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from cairn.storage.records import Environment, code_version

if TYPE_CHECKING:
    import torch

TORCH = ("torch", "numpy", "transformers", "peft", "triton")
"""Packages of every engine in PyTorch."""

MEGATRON = (*TORCH, "megatron-core", "transformer-engine", "flash-attn", "apex")

SGLANG = ("sglang", "sgl-kernel", "flashinfer-python", "torch", "numpy", "transformers", "triton")


def engine_environment(device: "torch.device | str", packages: Iterable[str]) -> Environment:
    """Return the environment of an engine in this process."""
    import torch  # imported here and below: a driver needs only versions, and no PyTorch

    on_gpu = torch.device(device).type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if on_gpu else _cpu(),
        threads=torch.get_num_threads(),
        host=socket.gethostname(),
        versions={**installed(packages), **(_gpu_libraries() if on_gpu else _cpu_libraries())},
    )


def server_environment(on_cpu: bool, threads: int, versions: Mapping[str, str]) -> Environment:
    """Return the environment of a server that this process started on its machine.

    `versions`: package versions of the server's interpreter.
    """
    return Environment(
        device=_cpu() if on_cpu else _first_gpu(),
        threads=threads,
        host=socket.gethostname(),
        versions={**versions, **_own_version(), **(_cpu_libraries() if on_cpu else {})},
    )


def combined(environments: Sequence[Environment]) -> Environment:
    """Return the environment of processes that computed together: where they differ, all their values."""
    first = environments[0]
    packages = sorted({package for one in environments for package in one.versions})
    return Environment(
        device=_all(one.device for one in environments),
        threads=first.threads if len({one.threads for one in environments}) == 1 else 0,
        host=_all(one.host or "" for one in environments),
        versions={package: _all(one.versions.get(package, "none") for one in environments) for package in packages},
    )


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python, Cairn and those of the packages that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **versions, **_own_version()}


def cpu_model() -> str:
    """Return the CPU's name from the kernel; the architecture where it has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _own_version() -> dict[str, str]:
    code = code_version()
    return {"cairn-rl": f"{code.package} {code.commit}" if code.commit else code.package}


def _cpu() -> str:
    """Return the CPU's name and the vector instructions that PyTorch's kernels use: a virtual machine may hide some."""
    import torch

    return f"{cpu_model()} ({torch.backends.cpu.get_cpu_capability()})"


def _first_gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def _cpu_libraries() -> dict[str, str]:
    """Return the setting with which MKL selects its kernels."""
    choice = os.environ.get("MKL_CBWR")
    return {"MKL_CBWR": choice} if choice else {}


def _gpu_libraries() -> dict[str, str]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    versions = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }
    return {name: str(value) for name, value in versions.items() if value is not None}


def _all(values: Iterable[str]) -> str:
    return " + ".join(sorted(set(values)))
