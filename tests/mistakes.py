"""What a configuration is refused for, and what it is warned of."""

from collections.abc import Callable
from typing import Any

from cairn.configs.errors import ConfigError
from cairn.configs.loader import parse

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"path": "m"},
    "data": {"path": "d"},
    "rollout": {
        "num_rollout": 1,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 16,
    },
}
"""A configuration without mistakes."""


def mistakes(**sections: dict[str, Any]) -> str:
    """Return the sentences on a configuration with some options of these sections, a line each: problems, and warnings
    of options without effect."""
    values = {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in {*SECTIONS, *sections}}
    return "\n".join(said(lambda note: parse(values, note=note)))


def said(load: Callable[[Callable[[str], None]], Any]) -> tuple[str, ...]:
    """Return the problems that loading a configuration raises, or else its warnings. `load` gets what takes these."""
    notes: list[str] = []
    try:
        load(notes.append)
    except ConfigError as error:
        return error.problems
    return tuple(notes)
