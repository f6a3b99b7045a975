"""Benchmarks by name, or in a YAML file of one's own. Nothing else makes a Benchmark from text."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from cairn.configs.errors import ConfigError
from cairn.configs.schema.base import Section
from cairn.configs.schema.evaluation import Benchmark
from cairn.configs.yaml_file import parse_yaml

# Machines by name, as a plan reckons with them.


MACHINES = Path(__file__).parent / "hardware.yaml"


class Hardware(Section):
    """A GPU and what is around it; of a machine without, one of its CPU's threads."""

    device: str
    """By which `cairn.engines.plan.rates` knows its floating-point operations."""

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
    values = parse_yaml(MACHINES.read_text("utf-8"))
    return {name: Hardware.model_validate(entry) for name, entry in values.items()}


# What the `config.json` of published models says, in `models/OWNER/NAME.json`: a recipe can be checked and planned
# without a download. Entries that decide nothing of the architecture are left out.


MODELS = Path(__file__).parent / "models"


def published_names() -> list[str]:
    """Of the models whose facts are here, without their owners."""
    return sorted(_repositories())


def published_config(name: str) -> dict[str, Any] | None:
    """The entries of `config.json` of the model `name`, such as Qwen3-4B, under their published names; None for a model
    that is not here."""
    repository = published_repository(name)
    return None if repository is None else json.loads((MODELS / f"{repository}.json").read_text("utf-8"))


def published_repository(name: str) -> str | None:
    """Where the model `name` is published on the Hugging Face hub, such as Qwen/Qwen3-4B; None for one not here."""
    return _repositories().get(name)


@cache
def _repositories() -> dict[str, str]:
    return {file.stem: f"{file.parent.name}/{file.stem}" for file in MODELS.glob("*/*.json")}


BENCHMARKS = Path(__file__).parent / "benchmarks"
"""Of those that Cairn comes with, one file each."""


def benchmark_names() -> list[str]:
    """Of the benchmarks that Cairn comes with."""
    return sorted(file.stem for file in BENCHMARKS.glob("*.yaml"))


def load_benchmark(name: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Benchmark:
    """The benchmark `name`, or the one in the file `name` if that ends in .yaml, with `changes` to its sections, such
    as `{"sampling": {"n": 8}, "source": {"data": "rows.jsonl"}}`. ConfigError lists every problem at once."""
    own = name.endswith((".yaml", ".yml"))
    if not own and name not in benchmark_names():
        raise ConfigError(
            [f"there is no benchmark {name!r}: use one of {', '.join(benchmark_names())}, or a YAML file of your own"]
        )
    file = Path(name) if own else BENCHMARKS / f"{name}.yaml"
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"{file} does not exist; docs/benchmarks.md shows what stands in a benchmark"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file} cannot be read as a text file: {error}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{file} is not YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{file} does not hold a benchmark; it should begin with `name:`"])
    for section, changed in (changes or {}).items():
        before = values.get(section)
        values[section] = {**(before if isinstance(before, dict) else {}), **changed}
    try:
        # Strict JSON mode takes no text for a number, but any list for a tuple.
        return Benchmark.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError([_sentence(file, problem) for problem in error.errors(include_url=False)]) from None
    except (ValueError, RecursionError):  # by an anchor, `&a [*a]`
        raise ConfigError([f"{file} cannot be written out: something in it holds itself"]) from None


def _sentence(file: Path, error: Any) -> str:
    """One problem as one sentence."""
    place = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "extra_forbidden":
            problem = "is not an option of a benchmark; docs/benchmarks.md lists them"
        case "missing":
            problem = "is required and missing"
        case "value_error":
            problem = error["msg"].removeprefix("Value error, ")
        case _:
            problem = f"is {json.dumps(error['input'], default=str)[:80]}; {error['msg'].replace('should', 'must')}"
    return f"{file.name}: {place} {problem}".replace("  ", " ")
