"""Benchmarks by name, or in a YAML file of one's own. Nothing else makes a Benchmark from text."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from cairn.configs.errors import ConfigError
from cairn.configs.schema.benchmark import Benchmark
from cairn.configs.yaml_file import parse_yaml

FOLDER = Path(__file__).parent / "benchmarks"
"""Of those that Cairn comes with, one file each."""


def benchmark_names() -> list[str]:
    """Of the benchmarks that Cairn comes with."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load_benchmark(name: str, changes: Mapping[str, Mapping[str, Any]] | None = None) -> Benchmark:
    """The benchmark `name`, or the one in the file `name` if that ends in .yaml, with `changes` to its sections, such
    as `{"sampling": {"n": 8}, "source": {"data": "rows.jsonl"}}`. ConfigError lists every problem at once."""
    own = name.endswith((".yaml", ".yml"))
    if not own and name not in benchmark_names():
        raise ConfigError(
            [f"there is no benchmark {name!r}: use one of {', '.join(benchmark_names())}, or a YAML file of your own"]
        )
    file = Path(name) if own else FOLDER / f"{name}.yaml"
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
