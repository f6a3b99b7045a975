"""The grader that a row of data names for itself, in its metadata under `reward.rm_type_key`.

| who says | counts |
|---|---|
| `reward.custom_rm_path` | for all rows |
| else a row's metadata | for this row |
| else `reward.rm_type` | for all other rows |

The order is slime's. A benchmark that names its own grader has it for all its rows.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardConfig
from cairn.tasks.rewards import OUTSIDE, get_grader, require_paying

Check = Callable[[Mapping[str, Any] | None, str], None]
"""Looks at a row's metadata; the second argument says where the row stands. Raises BadPlugin."""


def rows_name_graders(config: RewardConfig) -> bool:
    """Whether rows may name their own at all."""
    return config.custom_rm_path is None and config.rm_type_key is not None


def named_by_row(config: RewardConfig, metadata: Mapping[str, Any] | None) -> str | None:
    """What a row names; None where it leaves the grader to the run. Raises BadPlugin where it names no text."""
    if not rows_name_graders(config):
        return None
    assert config.rm_type_key is not None
    name = (metadata or {}).get(config.rm_type_key)
    if name is not None and not isinstance(name, str):
        raise BadPlugin(f"{config.rm_type_key} in the metadata is {name!r}, which names no grader")
    name = (name or "").strip() or None
    if name is not None and name != config.rm_type and (name in OUTSIDE or config.rm_type in OUTSIDE):
        asks = name if name in OUTSIDE else config.rm_type
        raise BadPlugin(
            f"{config.rm_type_key} in the metadata is {name!r} and reward.rm_type {config.rm_type!r}: {asks!r} asks "
            "something outside, and grades all rows or none"
        )
    return name


def row_check(config: RewardConfig, is_new: bool = False) -> Check:
    """Of every row, whether there is the grader that it names. `is_new`: and whether a run may begin with it."""

    @lru_cache
    def known(name: str) -> str | None:
        try:
            get_grader(config.of(name))
            if is_new:
                require_paying(name)
        except BadPlugin as error:
            return str(error)
        return None

    def check(metadata: Mapping[str, Any] | None, where: str) -> None:
        try:
            name = named_by_row(config, metadata)
            problem = None if name is None else known(name)
        except BadPlugin as error:
            problem = str(error)
        if problem is not None:
            raise BadPlugin(
                f"{where}: {problem}; or name another field of the metadata, or none, in reward.rm_type_key"
            )

    return check
