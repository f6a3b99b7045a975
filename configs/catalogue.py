"""Recipes, benchmarks, GPUs and published models by name. No other module makes a Benchmark from text."""

import json
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from cairn.configs.errors import ConfigError
from cairn.configs.schema.base import Section
from cairn.configs.schema.evaluation import Benchmark
from cairn.configs.yaml_file import parse_yaml, read_mapping

RECIPES = Path(__file__).parent / "recipes"
"""Folder of the recipes that come with Cairn."""
OWN_RECIPES = (".", "recipes", "configs/recipes")
"""Folders with the user's own recipes, relative to the working folder."""


def recipe_files(folder: Path) -> dict[str, Path]:
    """Return recipes by name, which is that of the file: the user's in and below the folder, then Cairn's, of which
    those in `models/` have a model's name. The first of a name wins. May include other YAML files."""
    own = (file for below in OWN_RECIPES for file in sorted((folder / below).glob("*.yaml")))
    files: dict[str, Path] = {}
    for file in (*own, *sorted(RECIPES.glob("*.yaml")), *sorted(RECIPES.glob("models/*.yaml"))):
        files.setdefault(file.stem, file)
    return files


def recipe_path(name: str) -> Path:
    """Return the file of a recipe: that of a name of `recipe_files`, else the name as a path. Raises ConfigError, which
    suggests the nearest name, where it is neither a file nor looks like one."""
    path = Path(name)
    if path.is_file():
        return path
    files = recipe_files(Path.cwd())
    if (stem := name.removesuffix(".yaml")) in files:
        return files[stem]
    if path.suffix:
        return path
    near = get_close_matches(stem, files, 1, 0.5)
    meant = f"did you mean {near[0]}?" if near else "name a YAML file, or a recipe of docs/recipes.md"
    raise ConfigError([f"there is no recipe or file {name}; {meant}"])


# Rates and sizes of machines, by name, for `cairn plan`.


MACHINES = Path(__file__).parent / "hardware.yaml"


class Hardware(Section):
    """A GPU and its machine. The entry `cpu` describes one CPU thread in place of the GPU."""

    device: str
    """Name under which `cairn.engines.plan.rates` lists the GPU's peak rate."""

    tflops: float | None = Field(None, gt=0)
    """Peak rate in 10^12 floating-point operations per second. Null for GPUs, whose rate is looked up by `device`."""

    memory_mib: float = Field(gt=0)
    """Memory of one GPU in MiB."""

    hbm_gb_s: float = Field(gt=0)
    """Bandwidth of the GPU's memory in GB/s."""

    nvlink_gb_s: float = Field(gt=0)
    """Bandwidth to the other GPUs of the machine in GB/s, in one direction."""

    network_gb_s: float = Field(gt=0)
    """Bandwidth to other machines in GB/s."""

    mfu: float = Field(0.35, gt=0, le=1)
    """Share of the peak floating-point rate that training and prefill reach. An assumption."""

    mbu: float = Field(0.5, gt=0, le=1)
    """Share of the memory bandwidth that decoding reaches. An assumption."""

    host_gb_s: float = Field(20, gt=0)
    """Bandwidth between a GPU and the host's memory in GB/s, in one direction. An assumption."""

    disk_gb_s: float = Field(2, gt=0)
    """Bandwidth of a machine's store in GB/s. An assumption."""

    reserved_gb: float = Field(3, ge=0)
    """Memory in GB that a process takes before it holds a model: on a GPU the CUDA context and communication. An
    assumption."""

    host_memory_gb: float = Field(2000, gt=0)
    """Memory of a machine with eight GPUs in GB that a run may use."""

    @property
    def memory(self) -> float:
        """Memory of a GPU in bytes."""
        return self.memory_mib * 2**20


CPU = "cpu"
"""Name of the entry that is no GPU."""
USUAL_GPU = "h100"
"""Name of the GPUs of a recipe that names none."""


def gpu_names() -> list[str]:
    """Return the names of the GPUs in `hardware.yaml`."""
    return sorted(_all().keys() - {CPU})


def hardware(name: str) -> Hardware:
    """Return the hardware of a name, which is not case-sensitive. Raises ConfigError, which suggests the nearest
    name."""
    machine = _all().get(name.lower())
    if machine is None:
        near = get_close_matches(name.lower(), gpu_names(), 1, 0.5)
        meant = f": did you mean {near[0]}?" if near else ""
        raise ConfigError([f"there is no GPU {name!r} among {', '.join(gpu_names())}{meant}"])
    return machine


def gpus_of_device(device: str) -> list[Hardware]:
    """Return the GPUs of a device name, such as A100, which may come in several sizes."""
    return [hardware(name) for name in gpu_names() if hardware(name).device == device]


@cache
def _all() -> dict[str, Hardware]:
    values = parse_yaml(MACHINES.read_text("utf-8"))
    return {name: Hardware.model_validate(entry) for name, entry in values.items()}


# The `config.json` of published models, in `models/OWNER/NAME.json`, so that a recipe can be checked and planned
# without a download. Entries that do not affect the architecture are left out.


MODELS = Path(__file__).parent / "models"


def published_names() -> list[str]:
    """Return the names of the published models listed here, without their owners."""
    return sorted(_repositories())


def published_config(name: str) -> dict[str, Any] | None:
    """Return the entries of `config.json` of the model `name`, such as Qwen3-4B, under their published names; None for
    a model that is not listed."""
    repository = published_repository(name)
    return None if repository is None else json.loads((MODELS / f"{repository}.json").read_text("utf-8"))


def published_repository(name: str) -> str | None:
    """Return the repository of the model `name` on the Hugging Face hub, such as Qwen/Qwen3-4B; None for a model that
    is not listed."""
    return _repositories().get(name)


_VARIANTS = re.compile(r"[-_](Instruct|Base|SFT|Thinking|FP8|INT4|BF16|torch_dist)$", re.IGNORECASE)


def published_relative(name: str) -> str | None:
    """Return the listed model that has the architecture of the model `name`: itself, or one of the same name but for
    endings such as -Instruct, -SFT and -FP8, and for case; None where there is none."""
    listed, shorter = {one.lower(): one for one in _repositories()}, name.lower()
    while shorter not in listed and (match := _VARIANTS.search(shorter)):
        shorter = shorter[: match.start()]
    return listed.get(shorter) or listed.get(f"{shorter}-instruct")


@cache
def _repositories() -> dict[str, str]:
    return {file.stem: f"{file.parent.name}/{file.stem}" for file in MODELS.glob("*/*.json")}


BENCHMARKS = Path(__file__).parent / "benchmarks"
"""Folder of the benchmarks that come with Cairn, one file each."""


def benchmark_names() -> list[str]:
    """Return the names of the benchmarks that come with Cairn."""
    return sorted(file.stem for file in BENCHMARKS.glob("*.yaml"))


def load_benchmark(name: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Benchmark:
    """Return the benchmark `name`, or the one in the file `name` if that ends in .yaml.

    Args:
        changes: values that replace those of sections, such as `{"sampling": {"n": 8}, "source": {"data":
            "rows.jsonl"}}`.

    Raises:
        ConfigError: lists every problem at once.
    """
    own = name.endswith((".yaml", ".yml"))
    if not own and name not in benchmark_names():
        raise ConfigError(
            [f"there is no benchmark {name!r}: use one of {', '.join(benchmark_names())}, or a YAML file of your own"]
        )
    file = Path(name) if own else BENCHMARKS / f"{name}.yaml"
    values = read_mapping(
        file, "docs/benchmarks.md shows the fields of a benchmark", "a benchmark; it should begin with `name:`"
    )
    for section, changed in (changes or {}).items():
        before = values.get(section)
        values[section] = {**(before if isinstance(before, dict) else {}), **changed}
    try:
        # Strict JSON mode rejects text in place of a number, but accepts any list for a tuple.
        return Benchmark.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError([_sentence(file, problem) for problem in error.errors(include_url=False)]) from None
    except (ValueError, RecursionError):  # by an anchor, `&a [*a]`
        raise ConfigError([f"{file} cannot be written out: a value in it contains itself"]) from None


def _sentence(file: Path, error: Any) -> str:
    """Return one problem as one sentence."""
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
