"""slime's flags and their counterparts in Cairn.

The table is `slime.yaml`. docs/coming-from-slime.md, error messages and the adapter for functions written for slime all
read it.
"""

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
    """Counterpart of one of slime's flags."""

    flag: str
    """The flag: `--rm-type`."""
    group: str
    """Heading under which people find the flag."""
    options: tuple[str, ...]
    """Dotted options of a recipe, list members as in `cairn.configs.loader`. Empty where there are none."""
    how: str
    """Other ways to do it, or differences to note. Markdown; may be empty where there are options."""
    why: str
    """Reason why there is no counterpart. Markdown; empty where there is one."""

    @property
    def attribute(self) -> str:
        """Name of the flag in slime's functions: `rm_type` of `args.rm_type`."""
        return self.flag.removeprefix("--").replace("-", "_")


@cache
def counterparts() -> dict[str, Counterpart]:
    """Return the counterparts of all of slime's flags, by `Counterpart.attribute`."""
    table = parse_yaml(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    rows = [
        Counterpart(flag, group, _names(row.get("to")), row.get("how", ""), row.get("why", ""))
        for group, flags in table.items()
        for flag, row in flags.items()
    ]
    return {one.attribute: one for one in rows}


def _names(to: str | list[str] | None) -> tuple[str, ...]:
    return (to,) if isinstance(to, str) else tuple(to or ())


class Status(Enum):
    """Status of a sample. Pending and aborted samples are neither graded nor filtered."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class NoSuchFlag(BadPlugin, AttributeError):
    """slime has no such flag. As an AttributeError it lets `getattr(args, name, default)` return the default."""


class Arguments:
    """slime's `args`: options of a configuration under the names of slime's flags. Only the options that the caller of
    the function has declared are available."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Store `options`: the values that the caller reads, by their dotted names."""
        self._options = options

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        flag = counterparts().get(name)
        if flag is None or not flag.options:
            why = f"{flag.why or flag.how}" if flag else "slime has no such flag"
            message = f"args.{name} does not exist here: {why}; write what the function needs into its file"
            raise BadPlugin(message) if flag else NoSuchFlag(message)
        if flag.options[0] not in self._options:
            raise BadPlugin(
                f"args.{name} is {flag.options[0]} here, which the step that calls the function does not read: write "
                "its value into the function's file, whose source counts in the step's digest"
            )
        return self._options[flag.options[0]]
