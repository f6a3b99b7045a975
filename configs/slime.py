"""slime's flags and their counterparts here: `slime.yaml`, which docs/coming-from-slime.md, error messages and the
adapter for functions written for slime all read."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cairn.configs.yaml_file import parse_yaml


@dataclass(frozen=True)
class Counterpart:
    """What stands for one of slime's flags."""

    flag: str
    """`--rm-type`."""
    group: str
    """What it has to do with, for people."""
    options: tuple[str, ...]
    """Of a recipe, dotted, list members as in `cairn.configs.options`. Empty where there is none."""
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
