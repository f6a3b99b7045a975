"""slime's flags and their counterparts here: `slime.yaml`, which docs/coming-from-slime.md, error messages and the
adapter for functions written for slime all read."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

from cairn.configs.plugins import BadPlugin
from cairn.configs.yaml_file import parse_yaml


@dataclass(frozen=True)
class Counterpart:
    """What stands for one of slime's flags."""

    flag: str
    """`--rm-type`."""
    group: str
    """What it has to do with, for people."""
    options: tuple[str, ...]
    """Of a recipe, dotted, list members as in `cairn.configs.loader`. Empty where there is none."""
    how: str
    """What does it otherwise, or what to mind. Markdown; may be empty where there are options."""
    why: str
    """Why there is none. Markdown; empty where there is one."""

    @property
    def attribute(self) -> str:
        """As slime's functions read it: `args.rm_type`."""
        return self.flag.removeprefix("--").replace("-", "_")


@cache
def counterparts() -> dict[str, Counterpart]:
    """Of every flag of slime's, by `Counterpart.attribute`."""
    table = parse_yaml(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    found = [
        Counterpart(flag, group, _names(row.get("to")), row.get("how", ""), row.get("why", ""))
        for group, rows in table.items()
        for flag, row in rows.items()
    ]
    return {one.attribute: one for one in found}


def _names(to: str | list[str] | None) -> tuple[str, ...]:
    return (to,) if isinstance(to, str) else tuple(to or ())


class Status(Enum):
    """Of a sample. The pending and the aborted are graded and filtered by nobody."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class NoSuchFlag(BadPlugin, AttributeError):
    """So that `getattr(args, name, default)` gives the default."""


class Arguments:
    """slime's `args`: options of a configuration by the names of slime's flags, as far as whoever calls the function
    has declared to read them."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """`options`: values by their dotted names, those that the caller reads."""
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        flag = counterparts().get(name)
        if flag is None or not flag.options:
            why = f"{flag.why or flag.how}" if flag else "slime has no such flag"
            told = f"args.{name} is nothing here: {why}; write what the function needs into its file"
            raise BadPlugin(told) if flag else NoSuchFlag(told)
        if flag.options[0] not in self._options:
            raise BadPlugin(
                f"args.{name} is {flag.options[0]} here, which the step that calls the function does not read: write "
                "its value into the function's file, whose source counts in the step's digest"
            )
        return self._options[flag.options[0]]
