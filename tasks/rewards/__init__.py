"""Graders: `grade(response, label, metadata) -> reward` or `grade(sample) -> reward`, one a file.
`cairn.tasks.rewards.pool` runs them.

`response` is the text without special tokens; `sample` is a `cairn.tasks.rewards.sample.Sample`, which holds all there
is. A grader returns a number, or a mapping with the number under `reward` and whatever else it wants recorded beside it
(JSON values). It raises where it cannot tell: the sample is then marked failed, which is not the same as wrong. Where a
new try may help it raises `TryAgain`, or one of the errors of `retry.grader.errors`. Modules of this package load
quickly: each grader process imports the one it needs and nothing of the others.
"""

import hashlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.configs.kinds import REWARD
from cairn.configs.plugins import BadPlugin

if TYPE_CHECKING:
    from cairn.configs.schema.reward import RewardConfig

Grader = Callable[..., float | Mapping[str, Any]]

_LIBRARIES = {"math": "math-verify", "math500": "math-verify"}
"""Of the graders that rest on another distribution, which."""
_SHARED = ("boxed", "notation", "sample")
"""Modules that the built-in graders share."""
_OTHERS = {"gsm8k_strict": ("gsm8k",), "math500": ("math",), "ifeval": ("instructions",)}
"""Of the graders that rest on other modules of this package, which."""


class TryAgain(Exception):
    """Raised by a grader: something that it asks does not answer now, and may later."""


@dataclass(frozen=True)
class NamedGrader:
    """Which grader, where it is and which version of it."""

    name: str
    path: str
    """For `cairn.configs.plugins.load_callable`."""
    version: str
    """Changes whenever the grader's code does."""
    whole_sample: bool = field(default=False, kw_only=True)
    """It takes a `cairn.tasks.rewards.sample.Sample` in place of response, label and metadata."""


def get_grader(config: "RewardConfig") -> NamedGrader:
    """The grader that the configuration names: `custom_rm_path` before `rm_type`.

    A grader of one's own is loaded, so that a mistake shows before anything starts; a built-in one is not.
    Raises BadPlugin if there is none of that name, or if it takes other arguments.
    """
    path = config.custom_rm_path
    if path is not None:
        whole = _takes_whole_sample(path)
        return NamedGrader(path, path, _version_of_source(path), whole_sample=whole)
    name = config.rm_type
    if name not in REWARD.ours():
        raise BadPlugin(
            f"there is no grader {name!r}: set rm_type to one of {', '.join(REWARD.ours())}, or custom_rm_path to "
            "package.module.function or file.py:function"
        )
    return NamedGrader(name, REWARD.path(name), _version_of_built_in(name), whole_sample=True)


def grader_version(grader: NamedGrader) -> str:
    """The version of the code that a new process would import now."""
    return _version_of_built_in(grader.name) if grader.name in REWARD.ours() else _version_of_source(grader.path)


def _version_of_source(path: str) -> str:
    from cairn.tasks.plugin_sources import source_digest  # a grader process has no need of it

    return source_digest(path)[:16]


def _version_of_built_in(name: str) -> str:
    digest = hashlib.sha256()
    for module in (name, *_SHARED, *_OTHERS.get(name, ())):
        spec = importlib.util.find_spec(f"cairn.tasks.rewards.{module}")
        assert spec is not None
        assert spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    distribution = _LIBRARIES.get(name)
    library = "" if distribution is None else f" {distribution} {importlib.metadata.version(distribution)}"
    return digest.hexdigest()[:16] + library


def _takes_whole_sample(path: str) -> bool:
    """Whether a grader takes one argument rather than three: where it may take either, its first is called `sample`."""
    grader = REWARD.load(path)
    ways = REWARD.ways(path, grader)
    if len(ways) == 1:
        return len(ways[0]) == 1
    try:
        return next(iter(inspect.signature(grader).parameters)) == "sample"
    except ValueError:  # it is not written in Python
        return False
