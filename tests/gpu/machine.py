"""What a machine brings: `python -m tests.gpu.machine [--json FILE]` reports it as one line of JSON, and fails where
engines that need neither Ray nor Prefect import them."""

import argparse
import importlib
import json
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

import cairn.engines

PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy", "pydantic", "pyarrow", "triton", "megatron-core")
MODULES = ("transformer_engine", "flash_attn", "sglang", "ray", "prefect")
ENGINES = (
    "cairn.engines.training.factory",
    "cairn.engines.training.torch.engine",
    "cairn.engines.training.weight_source",
    "cairn.engines.training.weight_group",
    "cairn.engines.rollout.transformers.engine",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the line to this file")
    options = parser.parse_args()
    for module in ENGINES:
        importlib.import_module(module)
    foreign = sorted({"ray", "prefect"} & sys.modules.keys())
    assert not foreign, f"the engines import {foreign}"
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = {
        "section": "machine",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "shared_memory_gib": round(shutil.disk_usage("/dev/shm").free / 2**30, 1),
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else None,
        "versions": {package: version_of(package) for package in PACKAGES},
        "there": {module: find_spec(module) is not None for module in MODULES},
        "cairn": list(cairn.engines.__path__),
    }
    line = json.dumps(found)
    print(line)
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(line + "\n")


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
