"""The kinds of code that a configuration names. All are found, checked and digested in the same way.

| value in the configuration | meaning |
|---|---|
| a name without a dot, such as `grpo` | built in: the function of the kind in the file of that name in its folder |
| `package.module.function` | user code, on the import path |
| `file.py:function` | user code, in a file |

A recipe may also write `package.module:function`, a file alone, which means its only fitting function, and the path of
one of slime's own functions that is built in here: see `canonical`.

A new built-in one is one more file in the folder; nothing else changes. A function declares with `plugin` what it needs
and which options it reads; `cairn.engines.training.needs` holds all that follows from that. The source of user code
counts in the digests of the steps that read the option (`cairn.tasks.durable.step`). Where a store may name code at all
(`cairn.flows.driver.trust`), it may name it in these options. Both follow from `KINDS`.
"""

import ast
import inspect
import re
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
    """Declaration of a function, made with `plugin`."""

    needs: frozenset[str] = frozenset()
    """Inputs to compute and pass to the function, among those that its kind may need."""
    reads: frozenset[str] = frozenset()
    """Options of its section that the function reads. Options of a built-in function have an effect only where it is
    named. Options of user code count in the digests of the steps that run it, as well as those that the steps
    themselves declare (`cairn.configs.view`)."""
    loss: str | None = None
    """Advantage estimators: the built-in loss that the estimator uses where `loss_type` has its default."""
    cached: bool = False
    """Graders: whether scores are cached in the store, so that no response is graded twice."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Built-in losses: default values of options where the loss's paper differs from PPO's."""
    library: str | None = None
    """Built-in graders: distribution that the grader imports."""
    mark: str | None = None
    """Built-in graders: mark behind which the grader itself looks for the answer, so that no box contains it."""
    pays: tuple[float, float] = (0.0, 1.0)
    """Built-in graders: rewards of a wrong and of a right answer."""
    picks: Callable[..., Any] | None = None
    """Losses: selects tokens of an optimizer step that the loss treats differently.

    `picks(advantages, log_probs, config)` takes [M] values of the step's trained tokens, with the log-probs of the
    policy before the update, and returns [M] bool. It is called once a step on every rank, and the loss finds the
    result in `tokens.picked`."""


def plugin(
    *,
    needs: Collection[str] = (),
    reads: Collection[str] = (),
    loss: str | None = None,
    cached: bool = False,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    library: str | None = None,
    mark: str | None = None,
    pays: tuple[float, float] = (0.0, 1.0),
    picks: Callable[..., Any] | None = None,
) -> Callable[[Function], Function]:
    """Declare properties of a function: see `Declaration`."""
    for name, names in (("needs", needs), ("reads", reads)):
        if isinstance(names, str):  # its letters would count as names
            raise TypeError(f"plugin({name}={names!r}) takes a set of names: write {name}={{{names!r}}}")
    if picks is not None and not {"advantages", "old_log_probs"} <= {*needs}:
        raise TypeError("plugin(picks=…) needs advantages and old_log_probs: write both into needs={…}")
    declaration = Declaration(frozenset(needs), frozenset(reads), loss, cached, defaults, library, mark, pays, picks)

    def declare(function: Function) -> Function:
        function.declaration = declaration  # type: ignore[attr-defined]
        return function

    return declare


def declared(function: Callable[..., Any]) -> Declaration:
    """Return what a function declares; an empty declaration if it declares nothing.

    A `partial` has the declaration of its function, and an object has that of its class's `__call__`.
    """
    while isinstance(function, partial):
        function = function.func
    own = getattr(function, "declaration", None) or getattr(type(function).__call__, "declaration", None)
    return own if isinstance(own, Declaration) else Declaration()


ARGS = "args"
"""Name of the first argument of functions that were written for slime."""


def written_for_slime(function: Callable[..., Any]) -> bool:
    """Whether a function's first argument is slime's `args`, or it is a class, as slime's data sources are."""
    if inspect.isclass(function):
        return True
    try:
        return next(iter(inspect.signature(function).parameters), None) == ARGS
    except ValueError:  # it is not written in Python
        return False


_SYNONYMS = {
    "sample": r"(\w+_)?sample|s|item",
    "samples": r"(\w+_)?samples|group|groups|batch|data",
    "responses": r"responses|completions",
    "num_samples": r"num_samples|n|num",
}
"""Other names of parameters of functions that were written for slime, as patterns."""


@dataclass(frozen=True)
class Kind:
    """A kind of code: the folder of the built-in functions, the call signature, and the inputs that it may need."""

    name: str
    """Name of the kind in messages."""
    options: tuple[str, ...]
    """Options of a run's configuration that name code of this kind. Options of list members have no position."""
    package: str
    """Package with one file for each built-in one; empty where there are none."""
    function: str
    """Name of the function in each of these files."""
    helpers: frozenset[str]
    """Other files of the package, which are no built-in ones."""
    takes: tuple[tuple[str, ...], ...]
    """Names of the positional arguments, for each signature that is allowed."""
    needs: frozenset[str] = frozenset()
    """All inputs that can be computed for a function of this kind."""
    waits: bool | None = False
    """Whether the function is a coroutine function; None: it may be either."""
    yields: bool = False
    """Whether the function may be a generator function."""
    method: str = ""
    """Method of a class that may stand in place of a function; empty where none may."""
    method_takes: tuple[str, ...] = ()
    """Names of the arguments of this method."""

    def built_in_names(self) -> list[str]:
        """Return the names of the built-in ones: of the files in the folder, without helpers. Imports none of them."""
        return sorted(set(_files(self.package)) - self.helpers) if self.package else []

    def path(self, name: str) -> str:
        """Return the path of the code `name`, for `load_callable`. Raises BadPlugin where there is no such code."""
        if "." in name:
            return name
        if name not in self.built_in_names():
            known = ", ".join([*self.built_in_names(), "package.module.function"])
            raise BadPlugin(f"there is no {self.name} {name!r}: use one of {known} or file.py:function")
        return f"{self.package}.{name}.{self.function}"

    def load(self, name: str) -> Callable[..., Any]:
        """Import and check the code `name`.

        Raises BadPlugin where it is not available, has another signature than this kind, or needs inputs that are not
        computed for this kind.
        """
        function = load_callable(self.path(name))
        self._check_signature(name, function)
        for need in sorted(declared(function).needs - self.needs):
            known = ", ".join(sorted(self.needs)) or "nothing"
            raise BadPlugin(
                f"the {self.name} {name!r} needs {need!r}, which nothing computes: let it need some of {known}"
            )
        takes_options = any("config" in arguments for arguments in self.takes)
        if not takes_options and (reads := declared(function).reads):
            raise BadPlugin(
                f"the {self.name} {name!r} reads {min(reads)!r}, but no {self.name} receives options: leave it out"
            )
        self._check_loss(name, declared(function).loss)
        return function

    def signatures_of(self, name: str, function: Callable[..., Any]) -> list[tuple[str, ...]]:
        """Return the signatures with which a function can be called; all of them where Python cannot inspect it.

        Raises BadPlugin where there is none.
        """
        takes = (self.method_takes,) if inspect.isclass(function) else self.takes
        try:
            signature = inspect.signature(self._called(name, function))
        except ValueError:  # it is not written in Python
            return list(takes)
        fitting = _fitting(signature, takes)
        if not fitting:
            ways = " or ".join(f"({', '.join(arguments)})" for arguments in takes)
            named = " by these names" if len(takes) > 1 else ""
            raise BadPlugin(f"the {self.name} {name!r} takes {signature}: let it take {ways}{named}")
        return fitting

    def _called(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what is called: of a class, its method."""
        if not inspect.isclass(function):
            return function
        method = getattr(function, self.method, None) if self.method else None
        if method is None:
            has = f", or a class with the method {self.method}" if self.method else ""
            raise BadPlugin(f"the {self.name} {name!r} is a class: name a function{has}")
        return partial(method, None)  # without `self`

    def _check_signature(self, name: str, function: Callable[..., Any]) -> None:
        self.signatures_of(name, function)
        function = self._called(name, function)
        sort = deferred(function.func if isinstance(function, partial) else function)
        may_be = {None: (None, "a coroutine"), True: ("a coroutine",), False: (None,)}[self.waits]
        if sort in may_be or (self.yields and sort == "a generator"):
            return
        wanted = {None: "a plain or a coroutine", True: "a coroutine", False: "a plain"}[self.waits]
        returns = ", with asyncio.run where it must wait" if self.waits is False else ""
        returns = "" if self.waits else f" and return its result{returns}"
        raise BadPlugin(
            f"the {self.name} {name!r} is {sort or 'a plain'} function: let it be {wanted} function{returns}"
        )

    def _check_loss(self, name: str, loss: str | None) -> None:
        if loss is None or (self is ESTIMATOR and loss in LOSS.built_in_names()):
            return
        known = f"name one of {', '.join(LOSS.built_in_names())}, or none" if self is ESTIMATOR else "leave it out"
        raise BadPlugin(f"the {self.name} {name!r} declares the loss {loss!r}, which does not fit it: {known}")

    def declaration(self, name: str) -> Declaration:
        """Return what the code `name` declares. Raises BadPlugin as `load`."""
        return self.built_in_declaration(name) or declared(self.load(name))

    def built_in_declaration(self, name: str) -> Declaration | None:
        """Return the declaration of a built-in one.

        It is read from the source where it consists of literals: losses import PyTorch, which takes seconds. Returns
        None for user code, which only `load` may run, and for an unknown name.
        """
        if name not in self.built_in_names():
            return None
        return _written_declaration(self.package, name, self.function) or declared(self.load(name))


@dataclass(frozen=True)
class ToolKind(Kind):
    """Tools. A built-in one is a function that makes the tool from `rollout.tool_options`. User code is a `cairn.Tool`,
    whose function may have any signature."""

    def load(self, name: str) -> Callable[..., Any]:
        """Import the tool `name`. Raises BadPlugin where it is not available or is no tool."""
        tool = load_callable(self.path(name))
        if "." in name and not hasattr(tool, "takes_key"):
            raise BadPlugin(f"the tool {name!r} is not a cairn.Tool: put @cairn.tool(kind=…) above the function")
        return tool


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@cache
def _files(package: str) -> list[str]:
    """Return the names of the modules in a package."""
    return [file.stem for file in _folder(package).glob("*.py") if file.stem != "__init__"]


@cache
def _written_declaration(package: str, name: str, function: str) -> Declaration | None:
    """Return what a function's source declares, without importing its file; None where only Python can tell."""
    for node in ast.parse((_folder(package) / f"{name}.py").read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            if not node.decorator_list:
                return Declaration()
            decorator = node.decorator_list[0]
            if len(node.decorator_list) > 1 or not isinstance(decorator, ast.Call):
                return None
            if ast.unparse(decorator.func) != plugin.__name__ or decorator.args:
                return None
            values = {str(one.arg): one.value for one in decorator.keywords}
            picks = values.pop("picks", None)
            try:
                literals: dict[str, Any] = {option: ast.literal_eval(value) for option, value in values.items()}
            except ValueError:
                return None
            if picks is not None:
                literals["picks"] = partial(_pick, f"{package}.{name}.{function}")
            return declared(plugin(**literals)(lambda: None))
    return None


def _pick(path: str, *arguments: Any) -> Any:
    """Import a function, and return what its declaration's `picks` returns."""
    picks = declared(load_callable(path)).picks
    assert picks is not None, path
    return picks(*arguments)


ESTIMATOR = Kind(
    "advantage estimator",
    ("algorithm.advantage_estimator",),
    "cairn.tasks.advantages",
    "estimate",
    frozenset({"batch", "step"}),
    (("batch", "config"),),
    frozenset({"old_log_probs", "ref_log_probs", "teacher_log_probs", "values", "components"}),
)
LOSS = Kind(
    "loss",
    ("algorithm.loss_type",),
    "cairn.engines.training.losses",
    "loss",
    frozenset({"kl", "objective", "value"}),
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
    frozenset(),
    (("tokens", "config"),),
)
AGGREGATION = Kind(
    "aggregation",
    ("algorithm.custom_pg_loss_reducer_function_path",),
    "cairn.engines.training.aggregations",
    "weigh",
    frozenset(),
    (("counts", "config"),),
)
REWARD = Kind(
    "grader",
    ("reward.custom_rm_path",),
    "cairn.tasks.rewards",
    "grade",
    frozenset({"boxed", "choices", "equality", "grader", "notation", "sample", "scorers"}),
    (
        ("sample",),
        ("samples",),
        ("response", "label", "metadata"),
        ("args", "sample"),
        ("args", "samples"),
        ("data_source", "solution_str", "ground_truth", "extra_info"),
        ("solution_str", "ground_truth"),
        ("prompts", "responses"),
    ),
    waits=None,
    method="compute_reward",
    method_takes=("prompts", "responses"),
)
FILTER = Kind(
    "filter",
    ("rollout.dynamic_sampling_filter",),
    "cairn.tasks.selecting.filters",
    "keep",
    frozenset({"sample"}),
    (("rewards",), ("samples",), ("args", "samples")),
)
SAMPLE_FILTER = Kind(
    "sample filter",
    ("rollout.rollout_sample_filter_path",),
    "cairn.tasks.selecting.sample_filters",
    "remove",
    frozenset(),
    (("groups",), ("args", "samples")),
)
SOURCE = Kind(
    "data source",
    ("data.data_source_path", "data.mixture.data_source_path", "eval.benchmarks.data_source_path"),
    "cairn.tasks.data",
    "rows",
    frozenset({"demonstrations", "drawing", "opening", "prompts", "rows", "slime_source", "stream"}),
    (("path",),),
    yields=True,
)
STATEFUL_SOURCE = Kind(
    "data source with a state",
    ("data.get_samples_path",),
    "",
    "get_samples",
    frozenset(),
    (("path", "state", "count", "results"),),
    method="get_samples",
    method_takes=("num_samples",),
)
CURRICULUM = Kind(
    "curriculum",
    ("data.curriculum.policy",),
    "cairn.tasks.selecting.curricula",
    "choose",
    frozenset(),
    (("state", "results", "count", "config"),),
)
STALENESS = Kind(
    "staleness policy",
    ("rollout.staleness_policy",),
    "cairn.tasks.selecting.staleness",
    "weigh",
    frozenset(),
    (("tokens", "max_age"),),
)
BUFFER = Kind(
    "buffer policy",
    ("rollout.buffer_filter_path",),
    "cairn.tasks.selecting.buffers",
    "order",
    frozenset({"group"}),
    (("groups",), ("args", "rollout_id", "buffer", "num_samples"), ("args", "buffer", "num_samples")),
)
BENCHMARK = Kind(
    "benchmark metric",
    ("eval.benchmarks.metric",),
    "cairn.tasks.evaluation.benchmarks",
    "measure",
    frozenset({"rows"}),
    (("samples",),),
)
GENERATE = Kind(
    "generate function",
    ("rollout.custom_generate_function_path",),
    "cairn.engines.agents.generation",
    "generate",
    frozenset({"call_formats"}),
    (
        ("ctx", "sample"),
        ("args", "sample", "sampling_params"),
        ("args", "sample", "sampling_params", "evaluation"),
        ("args", "sample"),
        ("args", "samples"),
        ("args", "samples", "evaluation"),
        ("args", "samples", "sampling_params"),
    ),
    waits=True,
)

TOOL = ToolKind(
    "tool",
    ("rollout.tools",),
    "cairn.engines.agents.tools",
    "tool",
    frozenset({"errors", "processes", "programs", "results", "tool", "worker"}),
    (("options",),),
)

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
"""Every option that names code, with the kind of that code."""


def named(config: Any, option: str) -> dict[str, str]:
    """Return the names in an option of a `RunConfig` that names code, by their places; empty where the option is unset.

    `eval.benchmarks.0.metric` is a place of `eval.benchmarks.metric`.
    """
    places = {"": config}
    for name in option.split("."):
        places = {
            f"{place}.{key}".removeprefix("."): value
            for place, section in places.items()
            for key, value in _members(name, getattr(section, name))
        }
    return {place: name for place, name in places.items() if name is not None}


def user_code(config: Any) -> dict[str, list[str]]:
    """Return the paths of the user's functions that a `RunConfig` names, by the option that names them."""
    code = {option: [path for path in named(config, option).values() if "." in path] for option in OPTIONS}
    return {option: paths for option, paths in code.items() if paths}


@cache  # every step calls it
def code_options(reads: tuple[str, ...]) -> tuple[str, ...]:
    """Return the options that name code, among some options and sections."""
    return tuple(option for option in OPTIONS if any(f"{option}.".startswith(f"{name}.") for name in reads))


@cache
def readers(kind: Kind) -> dict[str, list[str]]:
    """Return the options that some built-in functions of a kind read, each with the names of these functions."""
    names: dict[str, list[str]] = {}
    for name in kind.built_in_names():
        for option in sorted(kind.declaration(name).reads):
            names.setdefault(option, []).append(name)
    return names


def _members(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the members of a list with their positions; any other value as its only member."""
    if not isinstance(value, tuple):
        return [(name, value)]
    return [(f"{name}.{index}", member) for index, member in enumerate(value)]


def _binds(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _fitting(signature: inspect.Signature, takes: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the ways in which a function with a signature can be called."""
    fitting = [arguments for arguments in takes if _binds(signature, len(arguments))]
    if len(takes) > 1:  # the number of arguments does not distinguish the signatures of other libraries
        fitting = [arguments for arguments in fitting if _names(signature, arguments)]
    return fitting


def _names(signature: inspect.Signature, arguments: Sequence[str]) -> bool:
    """Whether a function's positional parameters have the names of the arguments, or no names (`_`, `*args`).

    Functions written for slime may use `_SYNONYMS`. A single parameter may have any name, unless the function also
    takes `**kwargs`, as functions of other libraries do.
    """
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    if len(arguments) == 1 and all(
        one.kind is not inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values()
    ):
        return named[:1] != [ARGS]
    if arguments[0] == ARGS and named[:1] != [ARGS]:
        return False
    patterns = [_SYNONYMS.get(argument, argument) if len(arguments) > 1 else argument for argument in arguments]
    return all(
        name.strip("_") == "" or re.fullmatch(pattern, name.strip("_"))
        for name, pattern in zip(named, patterns, strict=False)
    )


# Names as a recipe may write them.


_OF_SLIME = {
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std": "check_reward_nonzero_std",
    "slime.rollout.sglang_rollout.generate": "single_turn",
    "slime.rollout.data_source.RolloutDataSource": None,
    "slime.rollout.data_source.RolloutDataSourceWithBuffer": None,
    "slime.rollout.data_source.pop_first": "oldest_first",
    "slime.backends.megatron_utils.loss.icepop_function": "icepop",
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": "mis",
}
"""Built-in counterparts of functions of slime; None: what an option does without a name."""


def canonical(option: str, name: str) -> str | None:
    """Return the name of code in an option as it is recorded: a built-in one's, `package.module.function` or
    `file.py:function`.

    Runs no code: the functions of a file are read from its source. Raises BadPlugin where a file has no fitting
    function, or several.
    """
    if (dotted := name.replace(":", ".")) in _OF_SLIME:
        return _OF_SLIME[dotted]
    if name.endswith(".py"):
        return f"{name}:{_only_fitting(OPTIONS[option], name)}"
    return name if ".py:" in name else dotted


def _only_fitting(kind: Kind, name: str) -> str:
    file = Path(name).expanduser()
    try:
        tree = ast.parse(file.read_bytes(), name)
    except (OSError, SyntaxError, ValueError) as error:
        raise BadPlugin(f"{name} cannot be read ({error}): correct the path of the file") from None
    functions, fitting = dict[str, inspect.Signature](), list[str]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            functions[node.name] = signature = _signature(node.args)
            ways = _fitting(signature, kind.takes)
            # A single argument may have any name: only its usual name tells the function from its helpers.
            if any(len(way) > 1 or tuple(signature.parameters)[:1] == way for way in ways):
                fitting.append(node.name)
        elif isinstance(node, ast.ClassDef) and kind.method:
            names = [one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
            inherits = any(
                ast.unparse(base).endswith(("DataSource", "WithBuffer", "RewardModel")) for base in node.bases
            )
            fitting += [node.name] if kind.method in names or inherits else []
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        taken = " or ".join(f"({', '.join(arguments)})" for arguments in kind.takes)
        has = ", ".join(f"{one}{signature}" for one, signature in functions.items()) or "none"
        raise BadPlugin(f"{name} has no {kind.name}, which takes {taken}; its functions: {has}")
    raise BadPlugin(f"{name} has several: write {' or '.join(f'{name}:{one}' for one in fitting)}")


def _signature(arguments: ast.arguments) -> inspect.Signature:
    """Return the signature of a function in a source."""
    kind = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    parameters = [
        kind(one.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if place < required else None)
        for place, one in enumerate(positional)
    ]
    parameters += [kind(arguments.vararg.arg, kind.VAR_POSITIONAL)] if arguments.vararg else []
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    parameters += [kind(one.arg, kind.KEYWORD_ONLY, default=None if value else kind.empty) for one, value in pairs]
    parameters += [kind(arguments.kwarg.arg, kind.VAR_KEYWORD)] if arguments.kwarg else []
    return inspect.Signature(parameters)
