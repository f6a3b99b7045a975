"""Graders: `grade(response, label, metadata) -> reward`, one a file. `tasks.rewards.pool` runs them.

A grader returns a number, or a mapping with the number under `reward` and whatever else it wants recorded beside it
(JSON values). It raises where it cannot tell: the sample is then marked failed, which is not the same as wrong.
Modules of this package load quickly: each grader process imports the one it needs and nothing of the others.
"""

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.plugins import BadPlugin, load_callable, source_digest

if TYPE_CHECKING:
    from configs.schema.reward import RewardConfig

Grader = Callable[[str, str | None, dict[str, Any]], float | Mapping[str, Any]]

BUILT_IN: dict[str, str | None] = {"math": "math-verify", "exact_match": None, "random": None}
"""Name of a grader and the distribution that it rests on."""


@dataclass(frozen=True)
class NamedGrader:
    """Which grader, where it is and which version of it."""

    name: str
    path: str
    """For `tasks.plugins.load_callable`."""
    version: str
    """Changes whenever the grader's code does."""


def get_grader(config: "RewardConfig") -> NamedGrader:
    """The grader that the configuration names: `custom_rm_path` before `rm_type`.

    A grader of one's own is loaded, so that a mistake shows before anything starts; a built-in one is not.
    Raises BadPlugin if there is none of that name.
    """
    if config.custom_rm_path is not None:
        digest = source_digest(load_callable(config.custom_rm_path))
        return NamedGrader(config.custom_rm_path, config.custom_rm_path, digest[:16])
    name = config.rm_type
    if name not in BUILT_IN:
        raise BadPlugin(
            f"there is no grader {name!r}: set rm_type to one of {', '.join(BUILT_IN)}, or custom_rm_path to "
            "package.module.function or file.py:function"
        )
    spec = importlib.util.find_spec(f"tasks.rewards.{name}")
    assert spec is not None
    assert spec.origin is not None
    version = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()[:16]
    distribution = BUILT_IN[name]
    if distribution is not None:
        version += f" {distribution} {importlib.metadata.version(distribution)}"
    return NamedGrader(name, f"tasks.rewards.{name}.grade", version)
