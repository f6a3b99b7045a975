"""What functions written for slime get: its `args` and the status of a sample."""

import copy
import inspect
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from enum import Enum
from functools import cache, partial
from pathlib import Path
from typing import Any

from cairn.configs.counterparts import counterparts
from cairn.configs.plugins import BadPlugin, specs
from cairn.configs.yaml_file import parse_yaml


def as_in_row(text: str | None, opening: str = "{") -> Any:
    """Return a label as functions written for slime get it, a mapping where the row has one. `opening`: of a prompt it
    is `[{`, for messages that no chat template has rendered."""
    if text is not None and text.startswith(opening):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return text


class Status(Enum):
    """Status of a sample. Pending and aborted samples are neither graded nor filtered."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class NoSuchFlag(BadPlugin, AttributeError):
    """slime has no such flag. As an AttributeError it lets `getattr(args, name, default)` return the default."""


CUSTOM = "rollout.custom_config"
"""Option with the user's own attributes of `args`."""
_MORE = {
    "max_turns": "rollout.max_turns",
    "sglang_server_concurrency": "rollout.sglang_server_concurrency",
}
"""Attributes of `args` beside slime's flags that are options here."""
_OTHERWISE = frozenset(
    {
        *("actor_num_nodes", "data_source_path", "rollout_function_path", "opd_type", "eval_reward_key", "offload"),
        *("megatron_config_path", "recompute_loss_function", "tb_project_name", "use_stateless_adam", "seed"),
    }
)
"""Flags whose counterparts have values of another meaning: `args` has slime's default."""
# Flags that classes of `cairn.tasks.data.slime_source` read.
_DATA = (
    *("prompt_data", "input_key", "label_key", "metadata_key", "rollout_shuffle", "rollout_seed"),
    "n_samples_per_prompt",
)
_ARCHITECTURE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "vocab_size": "vocab_size",
    "num_experts": "num_experts",
    "moe_router_topk": "num_experts_per_tok",
    "max_position_embeddings": "max_position_embeddings",
}
"""Megatron's flags that follow from the model's `config.json`, with its names."""


_READ_FOR = {
    "rm_hub": ("rm_type", "custom_rm_path", "rm_url"),
    "sglang_rollout": ("rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_max_response_len"),
}
"""Flags that the modules of `cairn.slime` read for code that has a name."""


@cache
def defaults() -> dict[str, Any]:
    """Return the default of every flag of slime and of Megatron, by the name of its attribute."""
    table = parse_yaml(Path(__file__).with_name("slime_defaults.yaml").read_text("utf-8"))
    return {name: json.loads(value) for value, names in table.items() for name in names.split()}


@cache
def _options() -> dict[str, str]:
    """Return the options that have the values of `args`, by the attribute. Several flags may be one mapping."""
    own = {name: one.options[0] for name, one in counterparts().items() if one.options}
    own = {name: option for name, option in own.items() if ".N." not in option}  # a list of them has no one value
    by_name = {option.rpartition(".")[2]: option for option in own.values()}  # of `--disable-…` flags
    found = {name: option for name, option in by_name.items() if name in defaults()} | own | _MORE
    return {name: option for name, option in found.items() if name not in _OTHERWISE}


def option_of(attribute: str) -> str | None:
    """Return the option that has the value of an attribute of `args`; None where a recipe has no such value."""
    if attribute in _ARCHITECTURE:
        return "model.path"
    if attribute in _options():
        return _options()[attribute]
    if attribute.startswith("sglang_"):
        return "rollout.sglang"
    return "training.megatron" if attribute in defaults() and attribute not in counterparts() else None


def options_read(function: Any) -> tuple[str, ...]:
    """Return the options whose values a function written for slime may read as `args.NAME`.

    They follow from the names after a dot and in quotes in its file and in the user's own modules that it imports.
    """
    return tuple(sorted({CUSTOM, *map(str, map(option_of, _flags_in(function)))} - {"model.path"}))


def values_read(config: Any, function: Any) -> dict[str, Any]:
    """Return these values of a configuration, by their attributes of `args`: plain values, for other processes."""
    values = {name: _value(config, name) for name in sorted(_flags_in(function))}
    return values | dict(config.rollout.custom_config)


def _flags_in(function: Any) -> set[str]:
    """Return the flags with values of a recipe that a function may read, itself or by modules of `cairn.slime`."""
    names = {"reward_key", *_names_in(_module_of(function)), *(_DATA if hasattr(function, "get_samples") else ())}
    for word, flags in _READ_FOR.items():
        names |= {*flags} if word in names else set()
    return {name for name in names if option_of(name) is not None}


def _value(config: Any, attribute: str) -> Any:
    option = option_of(attribute)
    assert option is not None
    section, _, name = option.rpartition(".")
    value = config
    for part in filter(None, section.split(".")):
        value = getattr(value, part, None)
    value = getattr(value, name, None)
    if attribute in _ARCHITECTURE:
        return _architecture(config.model.path).get(_ARCHITECTURE[attribute], defaults().get(attribute))
    if option in ("rollout.sglang", "training.megatron"):
        return dict(value or {}).get(attribute.removeprefix("sglang_"), defaults().get(attribute))
    if option == "reward.reward_key" and value == "reward":  # the default, which slime does not have
        return None
    if option.startswith("model.") and value is not None:
        return os.path.abspath(value)
    return list(value) if isinstance(value, tuple) else value


def _architecture(folder: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text("utf-8"))
    return values | dict(values.get("text_config") or {})


def _module_of(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    return str(getattr(function, "__module__", None) or type(function).__module__)


_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@cache
def _names_in(module: str) -> frozenset[str]:
    """Return all names after a dot or in quotes in a loaded module and in the user's own modules that it imports, or
    names in a string."""
    files, names = set[str](), set[str]()
    first = sys.modules[module]
    pending = [(getattr(first, "__file__", None), first.__package__ or "")]
    while pending:
        file, package = pending.pop()
        if file is None or file in files or not file.endswith(".py") or file.startswith(_INSTALLED):
            continue
        files.add(file)
        text = Path(file).read_text("utf-8", "replace")
        names |= {*re.findall(r"""[.'"]([A-Za-z]\w*)""", text)}
        imports = re.findall(r"^\s*(?:from|import)\s+([.\w]+)(?:\s+import\s+(\w+))?", text, re.MULTILINE)
        for origin, one in imports + [(path, "") for path in re.findall(r"""['"](\w+(?:\.\w+)+)['"]""", text)]:
            level = len(origin) - len(origin.lstrip("."))
            above = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            name = ".".join([*above, *filter(None, origin[level:].split("."))])
            if name.partition(".")[0] not in ("cairn", "slime", "", *sys.builtin_module_names):
                found = [*specs(name), *(specs(f"{name}.{one}") if one else ())]
                pending += [(spec.origin if spec.has_location else None, spec.parent or "") for spec in found]
    return frozenset(names)


class Arguments:
    """slime's `args`: values of the recipe under the names of slime's and Megatron's flags, and the defaults of these
    for what a recipe does not set. A function may set further attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Store `values`, by attribute: see `values_read`."""
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in self._values:
            return self._values[name]
        if (option := option_of(name)) is not None and not name.startswith("sglang_"):
            raise BadPlugin(
                f"args.{name} is {option} here, and its value counts in the step's digest only where the function's "
                f"file has that name: write args.{name} there"
            )
        if name not in defaults():
            raise NoSuchFlag(
                f"args.{name} does not exist: slime has no such flag; give your own attributes in {CUSTOM}"
            )
        return copy.copy(defaults()[name])
