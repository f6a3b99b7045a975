"""What a process computes on, as far as it changes bits: asked of the process itself, and put into every commit."""

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
"""Packages that every engine in PyTorch rests on."""

MEGATRON = (*TORCH, "megatron-core", "transformer-engine", "flash-attn", "apex")

SGLANG = ("sglang", "sgl-kernel", "flashinfer-python", "torch", "numpy", "transformers", "triton")


def engine_environment(device: "torch.device | str", packages: Iterable[str]) -> Environment:
    """Of an engine in this process."""
    import torch  # here and below: a driver asks for no more than its versions, and does without

    on_gpu = torch.device(device).type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if on_gpu else f"{cpu_model()} ({_instructions()})",
        threads=torch.get_num_threads(),
        host=socket.gethostname(),
        versions={**installed(packages), **(_gpu_libraries() if on_gpu else _cpu_libraries())},
    )


def server_environment(on_cpu: bool, threads: int, versions: Mapping[str, str]) -> Environment:
    """Of a server that this process started on its machine, with the versions of its own interpreter."""
    return Environment(
        device=f"{cpu_model()} ({_instructions()})" if on_cpu else _first_gpu(),
        threads=threads,
        host=socket.gethostname(),
        versions={**versions, **_ours(), **(_cpu_libraries() if on_cpu else {})},
    )


def combined(environments: Sequence[Environment]) -> Environment:
    """Of several processes that computed one thing together: where they differ, all of what they say."""
    first = environments[0]
    packages = sorted({package for one in environments for package in one.versions})
    return Environment(
        device=_all(one.device for one in environments),
        threads=first.threads if len({one.threads for one in environments}) == 1 else 0,
        host=_all(one.host or "" for one in environments),
        versions={package: _all(one.versions.get(package, "none") for one in environments) for package in packages},
    )


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those of the packages that this interpreter has, of Python and of Cairn."""
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {"python": platform.python_version(), **versions, **_ours()}


def cpu_model() -> str:
    """As the kernel names it; the architecture where it names none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


def _ours() -> dict[str, str]:
    code = code_version()
    return {"cairn-rl": f"{code.package} {code.commit}" if code.commit else code.package}


def _instructions() -> str:
    """Which vector instructions PyTorch's kernels use: a virtual machine may hide some of its processor's."""
    import torch

    return torch.backends.cpu.get_cpu_capability()


def _first_gpu() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cuda"


def _cpu_libraries() -> dict[str, str]:
    """How MKL chooses its kernels."""
    choice = os.environ.get("MKL_CBWR")
    return {"MKL_CBWR": choice} if choice else {}


def _gpu_libraries() -> dict[str, str]:
    import torch

    nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else None
    found = {
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl)) if isinstance(nccl, tuple) else nccl,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _all(values: Iterable[str]) -> str:
    return " + ".join(sorted(set(values)))
