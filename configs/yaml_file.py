"""YAML for recipes: the core schema of YAML 1.2, where a duplicate key is an error."""

import re
from typing import Any

import yaml


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
    except ValueError:  # Python limits what it converts
        problem = f"the number has {len(node.value)} digits"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML document. Raises yaml.YAMLError, with the place of the problem, where it is not
    valid."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("it is nested too deeply") from None
    except yaml.YAMLError:
        raise
    except Exception as error:  # the library's constructors raise what they like
        raise yaml.YAMLError(f"a value does not fit its tag: {error}") from None
