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

from cairn.tasks.plugins import BadPlugin, deferred, load_callable

if TYPE_CHECKING:
    from cairn.configs.schema.reward import RewardConfig

Grader = Callable[..., float | Mapping[str, Any]]

BUILT_IN: dict[str, str | None] = {"math": "math-verify", "exact_match": None, "random": None}
"""Name of a grader and the distribution that it rests on."""
_SHARED = ("boxed", "notation", "sample")
"""Modules that the built-in graders share."""


class TryAgain(Exception):
    """Raised by a grader: something that it asks does not answer now, and may later."""


@dataclass(frozen=True)
class NamedGrader:
    """Which grader, where it is and which version of it."""

    name: str
    path: str
    """For `cairn.tasks.plugins.load_callable`."""
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
    if name not in BUILT_IN:
        raise BadPlugin(
            f"there is no grader {name!r}: set rm_type to one of {', '.join(BUILT_IN)}, or custom_rm_path to "
            "package.module.function or file.py:function"
        )
    return NamedGrader(name, f"cairn.tasks.rewards.{name}.grade", _version_of_built_in(name), whole_sample=True)


def grader_version(grader: NamedGrader) -> str:
    """The version of the code that a new process would import now."""
    return _version_of_built_in(grader.name) if grader.name in BUILT_IN else _version_of_source(grader.path)


def _version_of_source(path: str) -> str:
    from cairn.tasks.plugin_sources import source_digest  # a grader process has no need of it

    return source_digest(path)[:16]


def _version_of_built_in(name: str) -> str:
    digest = hashlib.sha256()
    for module in (name, *_SHARED):
        spec = importlib.util.find_spec(f"cairn.tasks.rewards.{module}")
        assert spec is not None
        assert spec.origin is not None
        digest.update(Path(spec.origin).read_bytes())
    distribution = BUILT_IN[name]
    library = "" if distribution is None else f" {distribution} {importlib.metadata.version(distribution)}"
    return digest.hexdigest()[:16] + library


def _takes_whole_sample(path: str) -> bool:
    """Whether a grader takes one argument rather than three: where it may take either, its first is called `sample`."""
    grader = load_callable(path)
    if kind := deferred(grader):
        raise BadPlugin(
            f"the grader {path!r} is a {kind} function: let it wait for its answer itself, with asyncio.run, and "
            "return its reward"
        )
    try:
        signature = inspect.signature(grader)
    except ValueError:  # it is not written in Python
        return False
    takes = {count for count in (1, 3) if _can_be_called(signature, count)}
    if not takes:
        raise BadPlugin(
            f"the grader {path!r} takes {signature}: let it take (response, label, metadata), or one sample of the "
            "type cairn.tasks.rewards.sample.Sample"
        )
    return takes == {1} or (1 in takes and next(iter(signature.parameters)) == "sample")


def _can_be_called(signature: inspect.Signature, count: int) -> bool:
    """With so many arguments by position."""
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True
