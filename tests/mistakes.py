"""What a configuration is refused for."""

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
    """Return the sentences on a configuration with some options of these sections, a line each."""
    values = {name: SECTIONS.get(name, {}) | sections.get(name, {}) for name in {*SECTIONS, *sections}}
    try:
        parse(values)
    except ConfigError as error:
        return "\n".join(error.problems)
    return ""
