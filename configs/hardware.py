"""Machines by name, as a plan reckons with them."""

from difflib import get_close_matches
from functools import cache
from pathlib import Path

from pydantic import Field

from cairn.configs.errors import ConfigError
from cairn.configs.schema.base import Section
from cairn.configs.yaml_file import parse_yaml

FILE = Path(__file__).parent / "hardware.yaml"


class Hardware(Section):
    """A GPU and what is around it; of a machine without, one of its CPU's threads."""

    device: str
    """By which `cairn.flows.costs.peaks` knows its floating-point operations."""

    tflops: float | None = Field(None, gt=0)
    """10^12 floating-point operations a second; of a GPU by `device`."""

    memory_mib: float = Field(gt=0)
    """MiB, of one GPU."""

    hbm_gb_s: float = Field(gt=0)
    """GB/s, of its memory."""

    nvlink_gb_s: float = Field(gt=0)
    """GB/s, to the other GPUs of the machine, in one direction."""

    network_gb_s: float = Field(gt=0)
    """GB/s, to other machines."""

    mfu: float = Field(0.35, gt=0, le=1)
    """Share of its floating-point operations that training and prefill reach. An assumption."""

    mbu: float = Field(0.5, gt=0, le=1)
    """Share of its memory's bandwidth that decoding reaches. An assumption."""

    host_gb_s: float = Field(20, gt=0)
    """GB/s, between a GPU and the host's memory, in one direction. An assumption."""

    disk_gb_s: float = Field(2, gt=0)
    """GB/s, of a machine's store. An assumption."""

    reserved_gb: float = Field(3, ge=0)
    """GB that a process holds before it has a model: of a GPU the CUDA context and communication. An assumption."""

    host_memory_gb: float = Field(1800, gt=0)
    """GB of a machine's memory. An assumption: that of an eight-GPU machine."""

    @property
    def memory(self) -> float:
        """Bytes of a GPU."""
        return self.memory_mib * 2**20


CPU = "cpu"
"""The name of what is no GPU."""


def gpu_names() -> list[str]:
    """Of the GPUs in `hardware.yaml`."""
    return sorted(_all().keys() - {CPU})


def hardware(name: str) -> Hardware:
    """What a name stands for, in whichever case. ConfigError names the nearest where there is none."""
    found = _all().get(name.lower())
    if found is None:
        near = get_close_matches(name.lower(), gpu_names(), 1, 0.5)
        meant = f": did you mean {near[0]}?" if near else ""
        raise ConfigError([f"there is no GPU {name!r} among {', '.join(gpu_names())}{meant}"])
    return found


@cache
def _all() -> dict[str, Hardware]:
    values = parse_yaml(FILE.read_text("utf-8"))
    return {name: Hardware.model_validate(entry) for name, entry in values.items()}
