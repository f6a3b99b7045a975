"""YAML for recipes: the core schema of YAML 1.2, where a duplicate key is an error."""

import re
from pathlib import Path
from typing import Any

import yaml

from cairn.configs.errors import ConfigError

MOST_VALUES = 1_000_000
"""Maximum number of values in a document whose anchors are expanded."""


class DuplicateKey(yaml.MarkedYAMLError):
    """A key is repeated in one mapping."""


class _Loader(yaml.SafeLoader):
    """Reads `1e-4` as a number, and `no` and `2026-01-02` as text, as in YAML 1.2; PyYAML follows 1.1."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise DuplicateKey(problem=f"the key {key.value!r} appears twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
]:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    try:
        return int(node.value, 16 if node.value.startswith("0x") else 10)
    except ValueError:  # Python limits the number of digits
        problem = f"the number has {len(node.value)} digits"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


_NO_JSON = {f"tag:yaml.org,2002:{tag}" for tag in ("binary", "timestamp", "omap", "pairs", "set")}
_Loader.yaml_constructors = {
    tag: construct for tag, construct in _Loader.yaml_constructors.items() if tag not in _NO_JSON
}
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises yaml.YAMLError, with the place of the problem, where it is not
    valid."""
    try:
        value = yaml.load(text, _Loader)
        if _count(value, {}) > MOST_VALUES:
            raise yaml.YAMLError(f"with its anchors expanded it has more than {MOST_VALUES:,} values")
        return value
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except yaml.YAMLError:
        raise
    except Exception as error:  # the library's constructors may raise any error
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from None


def _count(value: Any, counted: dict[int, int]) -> int:
    """Return the number of values in a value, with repeated ones. Raises yaml.YAMLError where one contains itself."""
    if not isinstance(value, dict | list):
        return 1
    if counted.setdefault(id(value), 0) == 0:
        counted[id(value)] = -1
        inner = value.values() if isinstance(value, dict) else value
        counted[id(value)] = 1 + sum(_count(one, counted) for one in inner)
    if counted[id(value)] < 0:
        raise yaml.YAMLError("a value in it contains itself")
    return counted[id(value)]


def read_mapping(path: Path, missing: str, wanted: str) -> dict[str, Any]:
    """Return the mapping in a YAML file. Raises ConfigError.

    Args:
        missing: hint where the file does not exist.
        wanted: what is wrong where the file holds something else.
    """
    try:
        values = parse_yaml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"{path} does not exist; {missing}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} cannot be read as a text file: {error}"]) from None
    except yaml.YAMLError as error:
        raise ConfigError([f"{path} is not YAML: {place_and_problem(error)}"]) from None
    if not isinstance(values, dict):
        raise ConfigError([f"{path} does not hold {wanted}"])
    return values


def place_and_problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a YAML text, with the line if it is known."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return " ".join(str(error).split())
