"""Options of other trainers and their counterparts in Cairn.

Each table is a YAML file of this folder: `slime.yaml`, `megatron.yaml`, `verl.yaml`, `trl.yaml`. docs/, error messages,
`cairn import` and the adapter for functions written for slime read them. A row is for one flag or several, and has:

| key | meaning |
|---|---|
| `to` | options of a recipe |
| `how` | what does it otherwise, or what to mind |
| `why` | reason why there is no counterpart |
| `value` | value of the option where the flag is a switch |
| `values` | the option's values by the trainer's |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from cairn.configs.yaml_file import parse_yaml

Table = Literal["slime", "megatron", "verl", "trl"]
TRAINERS: dict[Table, str] = {"slime": "slime", "megatron": "Megatron", "trl": "TRL", "verl": "verl"}


@dataclass(frozen=True)
class Counterpart:
    """Counterpart of an option of another trainer."""

    flag: str
    """The option as the trainer spells it: `--rm-type`, `actor_rollout_ref.rollout.n`, `num_generations`."""
    group: str
    """Heading under which people find it."""
    options: tuple[str, ...]
    """Dotted options of a recipe, list members as in `cairn.configs.loader`. Empty where there are none."""
    how: str
    """Other ways to do it, or differences to note. Markdown; may be empty where there are options."""
    why: str
    """Reason why there is no counterpart. Markdown; empty where there is one."""
    value: Any = None
    """Value of the option where the flag is a switch, if it is not true."""
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Values of the option by those of the trainer that differ."""

    @property
    def attribute(self) -> str:
        """Name of the option without dashes: `rm_type` of `--rm-type`."""
        return self.flag.removeprefix("--").replace("-", "_")


@cache
def counterparts(table: Table = "slime") -> dict[str, Counterpart]:
    """Return the counterparts of a trainer's options, by `Counterpart.attribute`."""
    groups = parse_yaml((Path(__file__).parent / f"{table}.yaml").read_text("utf-8"))
    rows = [
        Counterpart(
            flag,
            group,
            _names(row.get("to")),
            row.get("how", ""),
            row.get("why", ""),
            row.get("value"),
            row.get("values", {}),
        )
        for group, rows in groups.items()
        for flags, row in rows.items()
        for flag in flags.split()
    ]
    return {one.attribute: one for one in rows}


def _names(to: str | list[str] | None) -> tuple[str, ...]:
    return (to,) if isinstance(to, str) else tuple(to or ())
