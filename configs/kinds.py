"""The kinds of code that a configuration names, each found, checked and digested in one way.

| what a configuration says | is |
|---|---|
| a name without a dot, such as `grpo` | ours: the function of the kind in the file of that name in its folder |
| `package.module.function` | yours, on the import path |
| `file.py:function` | yours, in a file |

A new one of ours is a file in the folder, and nothing else. What a function needs and which options it reads it
declares itself, with `plugin`; what follows from that is said in one place, `cairn.engines.training.needs`. The source
of yours counts in the digests of the steps that read the option (`cairn.tasks.durable.step`), and a store may name it
where it may name code at all (`cairn.flows.driver.trust`): both follow from `KINDS`."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from cairn.configs.plugins import BadPlugin, deferred, load_callable

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Declaration:
    """What a function says of itself."""

    needs: frozenset[str] = frozenset()
    """Of what its kind may need, what is to be computed and handed to it."""
    reads: frozenset[str] = frozenset()
    """Options of its section that it reads. Of ours they have an effect only where it is named; of yours they count in
    the digests of the steps that run it, beside those that these declare (`cairn.configs.view`)."""
    loss: str | None = None
    """Of an advantage estimator: the loss of ours that goes with it, where `loss_type` is left at its default."""
    cached: bool = False
    """Of a grader: its answers are kept in the store, and none is asked for twice."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of options that are left out, of a loss of ours whose paper has others than PPO's."""
    picks: Callable[..., Any] | None = None
    """Which tokens of an optimizer step a loss treats apart: `picks(advantages, log_probs, config)`, from [M] of the
    step's trained tokens, log-probs those of the policy before the update, to [M] bool. It is asked once a step, on
    every rank, and the loss finds the answer in `tokens.picked`."""


def plugin(
    *,
    needs: Collection[str] = (),
    reads: Collection[str] = (),
    loss: str | None = None,
    cached: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    picks: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Declare what a function needs, which options it reads, which loss goes with it, whether its answers are kept,
    what options default to, and which tokens it treats apart: see `Declaration`."""
    for name, names in (("needs", needs), ("reads", reads)):
        if isinstance(names, str):  # whose letters would be taken for names
            raise TypeError(f"plugin({name}={names!r}) takes a set of names: write {name}={{{names!r}}}")
    if picks is not None and not {"advantages", "old_log_probs"} <= {*needs}:
        raise TypeError("plugin(picks=…) is asked about advantages and old_log_probs: write both into needs={…}")
    declaration = Declaration(frozenset(needs), frozenset(reads), loss, cached, defaults, picks)

    def declare(function: Function) -> Function:
        function.declaration = declaration  # type: ignore[attr-defined]
        return function

    return declare


def declared(function: Callable[..., Any]) -> Declaration:
    """What a function declares; nothing, if it does not. A `partial` declares what the function does that it calls, an
    object what its class says of `__call__`."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "declaration", None) or getattr(type(function).__call__, "declaration", None)
    return found if isinstance(found, Declaration) else Declaration()


ARGS = "args"
"""The name of the first argument of functions that were written for slime."""


def written_for_slime(function: Callable[..., Any]) -> bool:
    """Whether a function takes slime's `args` first."""
    return next(iter(inspect.signature(function).parameters), None) == ARGS


@dataclass(frozen=True)
class Kind:
    """One kind of code: where ours lies, how any of it is called, and what it may need."""

    name: str
    """In messages."""
    options: tuple[str, ...]
    """Of a run's configuration that name one; those of the members of a list without their positions."""
    package: str
    """With a file for each of ours."""
    function: str
    """What it is called in each of these files."""
    takes: tuple[tuple[str, ...], ...]
    """Its arguments, by position, in each of the ways in which it may be called."""
    needs: frozenset[str] = frozenset()
    """All that can be computed for one."""
    waits: bool | None = False
    """Whether it is a coroutine function; None: it may be one."""
    yields: bool = False
    """Whether it may be a generator function."""

    def ours(self) -> list[str]:
        """Names of those in the folder. Imports none of them: a file that defines the function is one."""
        return _defining(self.package, *(f"\n{before}def {self.function}(" for before in self._begins()))

    def path(self, name: str) -> str:
        """Where what `name` stands for is, for `load_callable`. Raises BadPlugin if it stands for nothing."""
        if "." in name:
            return name
        if name not in self.ours():
            raise BadPlugin(
                f"there is no {self.name} {name!r}: use one of {', '.join(self.ours())}, package.module.function or "
                "file.py:function"
            )
        return f"{self.package}.{name}.{self.function}"

    def load(self, name: str) -> Callable[..., Any]:
        """What `name` stands for, imported and checked. Raises BadPlugin if it cannot be had, cannot be called as this
        kind is, or needs what nobody computes."""
        function = load_callable(self.path(name))
        self._check_signature(name, function)
        for need in sorted(declared(function).needs - self.needs):
            known = ", ".join(sorted(self.needs)) or "nothing"
            raise BadPlugin(f"the {self.name} {name!r} needs {need!r}, which nobody computes: let it need of {known}")
        given_options = any("config" in way for way in self.takes)
        if not given_options and (reads := declared(function).reads):
            raise BadPlugin(
                f"the {self.name} {name!r} reads {min(reads)!r}, and no {self.name} is given options: leave it out"
            )
        self._check_loss(name, declared(function).loss)
        return function

    def ways(self, name: str, function: Callable[..., Any]) -> list[tuple[str, ...]]:
        """The ways in which a function can be called; all of them where Python cannot tell. Raises BadPlugin if it can
        be called in none."""
        try:
            signature = inspect.signature(function)
        except ValueError:  # it is not written in Python
            return list(self.takes)
        found = [arguments for arguments in self.takes if _binds(signature, len(arguments))]
        if len(self.takes) > 1:  # how many arguments there are tells no way from those of other libraries
            found = [arguments for arguments in found if _names(signature, arguments)]
        if not found:
            raise self.of_other_arguments(name, function)
        return found

    def of_other_arguments(self, name: str, function: Callable[..., Any]) -> BadPlugin:
        """The error for a function that cannot be called in any of the ways."""
        ways = " or ".join(f"({', '.join(arguments)})" for arguments in self.takes)
        named = " by these names" if len(self.takes) > 1 else ""
        return BadPlugin(f"the {self.name} {name!r} takes {inspect.signature(function)}: let it take {ways}{named}")

    def _check_signature(self, name: str, function: Callable[..., Any]) -> None:
        self.ways(name, function)
        found = deferred(function)
        may_be = {None: (None, "a coroutine"), True: ("a coroutine",), False: (None,)}[self.waits]
        if found in may_be or (self.yields and found == "a generator"):
            return
        wanted = {None: "a plain or a coroutine", True: "a coroutine", False: "a plain"}[self.waits]
        returns = ", with asyncio.run where it must wait" if self.waits is False else ""
        returns = "" if self.waits else f" and return its result{returns}"
        raise BadPlugin(
            f"the {self.name} {name!r} is {found or 'a plain'} function: let it be {wanted} function{returns}"
        )

    def _check_loss(self, name: str, loss: str | None) -> None:
        if loss is None or (self is ESTIMATOR and loss in LOSS.ours()):
            return
        known = f"name one of {', '.join(LOSS.ours())}, or none" if self is ESTIMATOR else "leave it out"
        raise BadPlugin(f"the {self.name} {name!r} declares the loss {loss!r}, which cannot go with it: {known}")

    def _begins(self) -> tuple[str, ...]:
        return {None: ("", "async "), True: ("async ",), False: ("",)}[self.waits]

    def declaration_of_ours(self, name: str) -> Declaration | None:
        """What one of ours declares; None of the user's code, which nothing but `load` may run, and where there is none
        of that name."""
        return declared(self.load(name)) if name in self.ours() else None


@dataclass(frozen=True)
class ToolKind(Kind):
    """Tools: one of ours is a function that makes it from `rollout.tool_options`, one of yours is a `cairn.Tool`, whose
    function takes what it likes."""

    def load(self, name: str) -> Callable[..., Any]:
        """Raises BadPlugin where it cannot be had, or is none."""
        found = load_callable(self.path(name))
        if "." in name and not hasattr(found, "takes_key"):
            raise BadPlugin(f"the tool {name!r} is no cairn.Tool: put @cairn.tool(kind=…) above the function")
        return found


@cache
def _defining(package: str, *beginnings: str) -> list[str]:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    files = Path(spec.origin).parent.glob("*.py")
    sources = {file.stem: file.read_text("utf-8") for file in files if file.stem != "__init__"}
    return sorted(name for name, source in sources.items() if any(begins in source for begins in beginnings))


ESTIMATOR = Kind(
    "advantage estimator",
    ("algorithm.advantage_estimator",),
    "cairn.tasks.advantages",
    "estimate",
    (("batch", "config"),),
    frozenset({"old_log_probs", "ref_log_probs", "teacher_log_probs", "values", "components"}),
)
LOSS = Kind(
    "loss",
    ("algorithm.loss_type",),
    "cairn.engines.training.losses",
    "loss",
    (("log_probs", "tokens", "config"),),
    frozenset(
        {
            *("advantages", "returns", "old_log_probs", "rollout_log_probs", "ref_log_probs", "teacher_log_probs"),
            *("teacher_top_log_probs", "values"),
        }
    ),
)
CORRECTION = Kind(
    "off-policy correction",
    ("algorithm.custom_tis_function_path",),
    "cairn.engines.training.corrections",
    "correct",
    (("tokens", "config"),),
)
AGGREGATION = Kind(
    "aggregation",
    ("algorithm.custom_pg_loss_reducer_function_path",),
    "cairn.engines.training.aggregations",
    "weigh",
    (("counts", "config"),),
)
REWARD = Kind(
    "grader",
    ("reward.custom_rm_path",),
    "cairn.tasks.rewards",
    "grade",
    (("sample",), ("samples",), ("response", "label", "metadata"), ("args", "sample"), ("args", "samples")),
    waits=None,
)
FILTER = Kind(
    "filter",
    ("rollout.dynamic_sampling_filter",),
    "cairn.tasks.selecting.filters",
    "keep",
    (("rewards",), ("samples",), ("args", "samples")),
)
SAMPLE_FILTER = Kind(
    "sample filter",
    ("rollout.rollout_sample_filter_path",),
    "cairn.tasks.selecting.sample_filters",
    "remove",
    (("groups",),),
)
SOURCE = Kind(
    "data source",
    ("data.data_source_path", "data.mixture.data_source_path", "eval.benchmarks.data_source_path"),
    "cairn.tasks.data",
    "rows",
    (("path",),),
    yields=True,
)
STATEFUL_SOURCE = Kind(
    "data source with a state",
    ("data.get_samples_path",),
    "cairn.tasks.data",
    "get_samples",
    (("path", "state", "count", "results"),),
)
CURRICULUM = Kind(
    "curriculum",
    ("data.curriculum.policy",),
    "cairn.tasks.selecting.curricula",
    "choose",
    (("state", "results", "count", "config"),),
)
STALENESS = Kind(
    "staleness policy",
    ("rollout.staleness_policy",),
    "cairn.tasks.selecting.staleness",
    "weigh",
    (("tokens", "max_age"),),
)
BUFFER = Kind(
    "buffer policy", ("rollout.buffer_filter_path",), "cairn.tasks.selecting.buffers", "order", (("groups",),)
)
BENCHMARK = Kind(
    "benchmark metric", ("eval.benchmarks.metric",), "cairn.tasks.evaluation.benchmarks", "measure", (("samples",),)
)
GENERATE = Kind(
    "generate function",
    ("rollout.custom_generate_function_path",),
    "cairn.engines.agents.generation",
    "generate",
    (("ctx", "sample"), ("args", "sample", "sampling_params")),
    waits=True,
)

TOOL = ToolKind("tool", ("rollout.tools",), "cairn.engines.agents.tools", "tool", (("options",),))

KINDS = (
    SOURCE,
    STATEFUL_SOURCE,
    CURRICULUM,
    ESTIMATOR,
    LOSS,
    CORRECTION,
    AGGREGATION,
    REWARD,
    FILTER,
    SAMPLE_FILTER,
    STALENESS,
    BUFFER,
    GENERATE,
    TOOL,
    BENCHMARK,
)

OPTIONS = {option: kind for kind in KINDS for option in kind.options}
"""Every option that names code, and the kind that it names."""


def named(config: Any, option: str) -> dict[str, str]:
    """What an option of a `RunConfig` that names code says, by its place: `eval.benchmarks.0.metric` is one of
    `eval.benchmarks.metric`. Empty where it says nothing."""
    found = {"": config}
    for name in option.split("."):
        found = {
            f"{place}.{key}".removeprefix("."): value
            for place, section in found.items()
            for key, value in _members(name, getattr(section, name))
        }
    return {place: name for place, name in found.items() if name is not None}


def user_code(config: Any) -> dict[str, list[str]]:
    """Where the user's own functions are that a `RunConfig` names, by the option that names each."""
    found = {option: [path for path in named(config, option).values() if "." in path] for option in OPTIONS}
    return {option: paths for option, paths in found.items() if paths}


def naming_code(reads: Collection[str]) -> tuple[str, ...]:
    """Of the options that name code, those that are among some options and sections."""
    return _naming_code(tuple(reads))


@cache  # steps ask it of what they read, again and again
def _naming_code(reads: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(option for option in OPTIONS if any(f"{option}.".startswith(f"{name}.") for name in reads))


@cache
def readers(kind: Kind) -> dict[str, list[str]]:
    """Of every option that some of ours reads and not all of the kind need to, the names of those that do."""
    found: dict[str, list[str]] = {}
    for name in kind.ours():
        for option in sorted(declared(kind.load(name)).reads):
            found.setdefault(option, []).append(name)
    return found


def _members(name: str, value: Any) -> list[tuple[str, Any]]:
    """The members of a list by their positions, anything else as it is."""
    return (
        [(f"{name}.{index}", member) for index, member in enumerate(value)]
        if isinstance(value, tuple)
        else [(name, value)]
    )


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _names(signature: inspect.Signature, arguments: Sequence[str]) -> bool:
    """Whether the parameters are named as the arguments that they are given, or not at all (`_`, `*args`); of a
    function for slime the first one. A single one may have any name, but not beside `**kwargs`: other
    libraries' are so."""
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    if arguments[0] == ARGS:
        return named[:1] == [ARGS]
    if len(arguments) == 1 and all(
        one.kind is not inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values()
    ):
        return True
    return all(name.strip("_") in ("", argument) for name, argument in zip(named, arguments, strict=False))
