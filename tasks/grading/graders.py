"""Find the grader that a configuration or a data row names, and how to call it. `cairn.tasks.grading.pool` runs it.

| signature | arguments |
|---|---|
| `grade(response, label, metadata)` | the text without special tokens, and the label and metadata of the data row |
| `grade(sample)` | a `cairn.tasks.rewards.sample.Sample`, which holds everything |
| `grade(samples)` | a list of them: `reward.rm_batch_size` at most, or with `reward.group_rm` all of one group |
| `grade(args, sample)`, `grade(args, samples)` | as in slime: see `cairn.tasks.slime` |
| `compute_score(data_source, solution_str, ground_truth, extra_info)` | as in verl: `data_source` is in the metadata |
| `compute_score(solution_str, ground_truth)` | response and label |
| `compute_reward(prompts, responses)` | texts; a function, or a method of a class, which is made once in each process |

Each may be a coroutine function. A grader returns a number, or a mapping with the number under `reward` (another name:
`reward.reward_key`) and other JSON values to record. A grader of several samples returns a list of these; an exception
in it is the result of a sample that the grader cannot judge. A grader that can judge none raises: the sample is then
marked failed, which differs from wrong. Where a retry may help it raises `TryAgain`, or one of the errors of
`retry.grader.errors`.

Built-in graders are modules of `cairn.tasks.rewards`, one a file. They load quickly: a grader process imports the one
that it needs and none of the others.
"""

import hashlib
import importlib.metadata
import inspect
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cairn.configs.kinds import REWARD, declared
from cairn.configs.plugins import BadPlugin, deferred
from cairn.configs.schema.reward import RewardConfig
from cairn.storage.store import canonical
from cairn.tasks import rewards
from cairn.tasks.rewards.grader import (
    BOXED,
    MODEL_PATH,
    OUTSIDE,
    Grader,
    NamedGrader,
    Takes,
    constructor_arguments,
    paid,
)

_FOLDER = Path(rewards.__file__).parent


def get_grader(config: "RewardConfig", args: Mapping[str, Any] = MappingProxyType({})) -> NamedGrader:
    """Return the grader that the configuration names: `custom_rm_path` before `rm_type`.

    A user's grader is loaded, so that an error appears before anything starts; a built-in one is not. Raises BadPlugin
    if no grader has that name, or if it takes other arguments.

    Args:
        args: values for a grader written for slime: `cairn.configs.slime.values_read`.
    """
    path = config.custom_rm_path
    if path is not None:
        model = config.custom_rm_model_path
        grader = _user_grader(path, dict(args) | ({} if model is None else {MODEL_PATH: os.path.abspath(model)}))
    else:
        grader = _outside(config) if config.rm_type in OUTSIDE else _built_in(config.rm_type)
    if config.group_rm and not grader.takes.several:
        raise BadPlugin(
            f"group_rm passes the samples of a whole group, but the grader {grader.name!r} takes one: let it take "
            "(samples), or set group_rm to false"
        )
    return grader


def grader_version(grader: NamedGrader) -> str:
    """Return the version of the code that a new process would import now."""
    if grader.path != grader.name:
        return _version_of_built_in(grader.name)
    return _version_of_user_grader(grader.path, grader.args)


def require_findable_answer(name: str) -> None:
    """Raise BadPlugin where a built-in grader behind `BOXED` could never find an answer."""
    file = name.removeprefix(BOXED)
    declaration = REWARD.built_in_declaration(file) if name != file else None
    if declaration is not None and declaration.mark is not None:
        raise BadPlugin(
            f"the grader {name!r} would never give a reward: {file} looks for the answer after {declaration.mark}, "
            f"which no box contains; set rm_type to {file}"
        )


def returns_only_a_number(grader: NamedGrader) -> bool:
    """Whether the grader is built in and returns a reward and nothing else."""
    if grader.path == grader.name:
        return False
    if grader.name in OUTSIDE:
        return grader.name != "remote_rm"
    return inspect.signature(REWARD.load(grader.name.removeprefix(BOXED))).return_annotation is float


def _user_grader(path: str, args: Mapping[str, Any]) -> NamedGrader:
    function = REWARD.load(path)
    method = getattr(function, REWARD.method) if inspect.isclass(function) else function
    takes, waits = _takes(path, function), deferred(method) is not None
    if inspect.isclass(function):
        constructor_arguments(path, function, args)
    args = args if takes.of_slime or inspect.isclass(function) else {}
    return NamedGrader(path, path, _version_of_user_grader(path, args), takes, waits, args=args)


def _outside(config: "RewardConfig") -> NamedGrader:
    from cairn.tasks.grading.outside import reward_model  # a grader process has no need of it
    from cairn.tasks.grading.outside.kinds import outside

    if config.rm_type == reward_model.NAME:
        version = reward_model.version_of(reward_model.options_of(config))
        return NamedGrader(reward_model.NAME, reward_model.__name__, version, Takes.SAMPLE, waits=False)
    grader = outside(config)
    return NamedGrader(
        grader.name, f"cairn.tasks.grading.outside.{grader.name}", grader.version, Takes.SAMPLE, waits=True
    )


def _built_in(name: str) -> NamedGrader:
    file = name.removeprefix(BOXED)
    if file not in REWARD.built_in_names():
        known = ", ".join(sorted([*REWARD.built_in_names(), *OUTSIDE]))
        raise BadPlugin(
            f"there is no grader {name!r}: set rm_type to one of {known}, or to one of them after {BOXED}, or "
            "custom_rm_path to package.module.function or file.py:function"
        )
    function = REWARD.load(file)
    library = declared(function).library
    if library is not None and not _is_installed(library):
        raise BadPlugin(f"the grader {name!r} needs {library}, which is not installed: pip install {library}")
    wrong = None if file == "episode" else paid(file)[0]
    takes, waits = _takes(file, function), deferred(function) is not None
    return NamedGrader(name, REWARD.path(file), _version_of_built_in(name), takes, waits, wrong=wrong)


def _version_of_user_grader(path: str, args: Mapping[str, Any]) -> str:
    """Return the digest of the grader's source, and of the values of `args` where it has any."""
    from cairn.tasks.durable.plugin_sources import source_digest  # a grader process has no need of it

    return source_digest(path)[:16] + (f" {canonical.digest(dict(args))[:16]}" if args else "")


def _version_of_built_in(name: str) -> str:
    """Return the digest of a built-in grader's file and of those in its folder that it imports, and its library."""
    from cairn.tasks.durable.plugin_sources import imported_names  # a grader process has no need of it

    name, package = name.removeprefix(BOXED), REWARD.package
    modules, pending = set[str](), [name]
    while pending:
        module = pending.pop()
        if module in modules or not (_FOLDER / f"{module}.py").is_file():
            continue
        modules.add(module)
        imports = imported_names(_FOLDER / f"{module}.py", package)
        pending += [one.removeprefix(f"{package}.").partition(".")[0] for one in imports if one.startswith(package)]
    digest = hashlib.sha256()
    for module in sorted(modules):
        digest.update((_FOLDER / f"{module}.py").read_bytes())
    library = declared(REWARD.load(name)).library
    return digest.hexdigest()[:16] + ("" if library is None else f" {library} {importlib.metadata.version(library)}")


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _takes(path: str, grader: Grader) -> Takes:
    """Return what a user's grader takes.

    If it accepts one argument, and its first parameter is called `sample` or `samples`, the name decides. Else a grader
    of two arguments is written for slime, one of three takes texts, and any other takes a sample.
    """
    ways = REWARD.signatures_of(path, grader)
    if ("prompts", "responses") in ways and len(ways) == 1:
        return Takes.PROMPTS
    if len(ways) == 1 and ", ".join(ways[0]) in (Takes.VERL, Takes.SOLUTION):
        return Takes(", ".join(ways[0]))
    counts = {len(way) for way in ways}
    try:
        first, *_ = inspect.signature(grader).parameters
    except ValueError:  # it is not written in Python
        return Takes.TEXTS
    if 1 in counts and first in (Takes.SAMPLE, Takes.SAMPLES):
        return Takes(first)
    if 2 in counts:
        return Takes.SLIME_SAMPLES if ("args", "samples") in ways else Takes.SLIME_SAMPLE
    return Takes.TEXTS if 3 in counts else Takes.SAMPLE


# The grader that a data row names in its metadata, under `reward.rm_type_key`. `reward.custom_rm_path` overrides it,
# and it overrides `reward.rm_type`, as in slime. A benchmark that names its own grader uses it for all its rows.


Check = Callable[[Mapping[str, Any] | None, str], None]
"""Function that checks a row's metadata. The second argument says which row it is. Raises BadPlugin."""


def rows_name_graders(config: RewardConfig) -> bool:
    """Whether rows may name graders at all."""
    return config.custom_rm_path is None and config.rm_type_key is not None


def named_by_row(config: RewardConfig, metadata: Mapping[str, Any] | None) -> str | None:
    """Return the name that a row gives; None where it leaves the grader to the run.

    Raises BadPlugin where the name is no text, or where one of the two graders calls something outside: such a grader
    grades all rows or none.
    """
    if not rows_name_graders(config):
        return None
    assert config.rm_type_key is not None
    name = (metadata or {}).get(config.rm_type_key)
    if name is not None and not isinstance(name, str):
        raise BadPlugin(f"{config.rm_type_key} in the metadata is {name!r}, which names no grader")
    name = (name or "").strip() or None
    if name is not None and name != config.rm_type and (name in OUTSIDE or config.rm_type in OUTSIDE):
        service = name if name in OUTSIDE else config.rm_type
        raise BadPlugin(
            f"{config.rm_type_key} in the metadata is {name!r} and reward.rm_type {config.rm_type!r}: {service!r} "
            "calls a service, and must grade all rows or none"
        )
    return name


def row_check(config: RewardConfig) -> Check:
    """Return a check for every row: the grader that it names exists, and can find an answer."""

    @lru_cache
    def known(name: str) -> str | None:
        try:
            get_grader(config.of(name))
            require_findable_answer(name)
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
