"""Tools: functions that an episode calls with `ctx.call`, with the metadata for models and records.

    @cairn.tool(kind="pure")
    def multiply(a: float, b: float) -> float:
        \"\"\"The product of two numbers.\"\"\"
        return a * b

Execution of a tool:

| the function | runs | at its timeout |
|---|---|---|
| `async def` | on the loop of the episodes | is cancelled; its end is not awaited |
| `def` that can be imported by module and name | in a tool process, see `processes.py` | its process is killed |
| any other `def`: bound methods, closures, and all with a state (`deterministic`) | in a thread of the episode's \
process | keeps running, since a thread cannot be killed; its result is discarded |

Results are bounded (`results.py`). Every error of a tool becomes a `ToolFailed`: the model receives it, and other
episodes are not affected.
"""

import asyncio
import enum
import inspect
import re
import threading
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, get_args

from cairn.configs.kinds import TOOL
from cairn.configs.plugins import BadPlugin, deferred, path_of
from cairn.engines.agents.tools.errors import Reason, ToolFailed, ToolLost, ToolUnavailable
from cairn.engines.agents.tools.processes import in_a_thread, processes
from cairn.engines.agents.tools.results import json_value, shortened

if TYPE_CHECKING:
    from cairn.configs.schema.rollout import ToolOptions

# Parameters of a tool: read from the function's signature and docstring, published to models as JSON schema, and
# used to validate their arguments.


KEY = "idempotency_key"
"""Name of the parameter that models do not see: the call's own key, the same in every attempt."""
_MOST_ERRORS = 5
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameters:
    """The parameters of a function. Types and docstring are read on first use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the signature. Raises TypeError where the function takes positional-only or `*args` arguments."""
        self._function = function
        self._signature = inspect.signature(function)
        for parameter in self._signature.parameters.values():
            if parameter.kind not in (*_NAMED, inspect.Parameter.VAR_KEYWORD):
                raise TypeError(
                    f"a tool's arguments are passed by name, but {parameter} of "
                    f"{getattr(function, '__qualname__', function)} has none: make it an ordinary parameter"
                )

    @property
    def takes_key(self) -> bool:
        """Whether the function receives the call's idempotency key."""
        return KEY in self._signature.parameters

    @cached_property
    def schema(self) -> dict[str, Any]:
        """JSON schema of an object with the arguments."""
        schema: dict[str, Any] = _without_titles(self._adapter.json_schema())
        schema.setdefault("properties", {})
        schema.setdefault("type", "object")
        for name, text in self._docstring[1].items():
            if (known := schema["properties"].get(name)) is not None:
                known.setdefault("description", text)
        return schema

    @property
    def description(self) -> str:
        """The docstring of the function, without the part about its arguments."""
        return self._docstring[0]

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the function's types. Raises ValueError with the mismatches."""
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        if not isinstance(arguments, Mapping):
            raise ValueError(f"its arguments have to be an object, and not {type(arguments).__name__}")
        try:
            converted: dict[str, Any] = self._adapter.validator.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            raise ValueError(self._error_text(error)) from None
        return converted

    def _error_text(self, error: Any) -> str:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        problems = []
        for one in errors[:_MOST_ERRORS]:
            place = ".".join(map(str, one["loc"]))[:100]
            if one["type"].startswith("missing") and len(one["loc"]) == 1:
                problems.append(f"{place} is missing")
            elif one["type"] == "unexpected_keyword_argument":
                problems.append(f"there is no argument {place}")
            else:
                problems.append(f"{place}: {one['msg'][:200]}")
        if len(errors) > _MOST_ERRORS:
            problems.append(f"and {len(errors) - _MOST_ERRORS} more")
        return f"{'; '.join(problems)} (it takes {', '.join(self.schema['properties']) or 'nothing'})"

    @cached_property
    def _docstring(self) -> tuple[str, dict[str, str]]:
        import docstring_parser

        docstring = docstring_parser.parse(inspect.getdoc(self._function) or "")
        parts = [part for part in (docstring.short_description, docstring.long_description) if part]
        return "\n".join(parts), {one.arg_name: one.description for one in docstring.params if one.description}

    @cached_property
    def _adapter(self) -> Any:
        """A pydantic adapter with a function of the same signature, which returns its arguments."""
        from pydantic import TypeAdapter

        hints = typing.get_type_hints(_plain(self._function), include_extras=True)
        parameters = [
            one.replace(
                annotation=hints.get(name, Any),
                kind=inspect.Parameter.KEYWORD_ONLY if one.kind in _NAMED else one.kind,
            )
            for name, one in self._signature.parameters.items()
            if name != KEY
        ]

        def function(**arguments: Any) -> dict[str, Any]:
            return arguments

        adapted: Any = function
        adapted.__signature__ = self._signature.replace(
            parameters=parameters, return_annotation=inspect.Signature.empty
        )
        adapted.__annotations__ = {one.name: one.annotation for one in parameters}
        return TypeAdapter(adapted)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable that has the annotations: for a callable object, the method of its class."""
    while hasattr(function, "func"):  # partial
        function = function.func
    if inspect.isroutine(function):
        return function
    called: Callable[..., Any] = type(function).__call__
    return called


def _without_titles(schema: Any, names: bool = False) -> Any:
    """Return a schema without titles. `names`: its keys are names of properties, where `title` may be one."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, key in ("properties", "$defs"))
        for key, value in schema.items()
        if names or key != "title"
    }


__all__ = ["NOT_DONE", "Intent", "Kind", "Tool", "ToolFailed", "ToolLost", "ToolUnavailable", "tool"]

Kind = Literal["pure", "deterministic", "effects"]
"""Side effects of a call. `pure`: none, so that it may be repeated. `deterministic`: it changes a state of the episode,
which the same calls rebuild. `effects`: it changes the outside world."""

TIMEOUT = 30.0
"""Maximum seconds of a call."""
MAX_OUTPUT = 16_384
"""Maximum characters of a result."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_LONGEST_ERROR = 1000
_TO_PREPARE = 24 * 3600.0


class _NotDone(enum.Enum):
    NOT_DONE = "not done"

    def __repr__(self) -> str:
        return "cairn.NOT_DONE"


NOT_DONE = _NotDone.NOT_DONE
"""Result of `reconcile` for a call that has not happened; the call is then made again."""


@dataclass(frozen=True)
class Intent:
    """A call with effects that was about to be made when its episode was interrupted; whether it happened is
    unknown."""

    run: str
    iteration: int
    group: int
    sample: int
    attempt: str
    turn: int
    """Number of replies of the policy before the call."""
    call: str
    """Id of the call within the episode."""
    tool: str
    arguments: Mapping[str, Any]
    key: str
    """Key of the call, the same in every attempt; the tool's `idempotency_key`, if it takes one."""


class Tool:
    """A function with its metadata."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        kind: Kind,
        timeout: float = TIMEOUT,
        memory: int | None = None,
        max_output: int = MAX_OUTPUT,
        reconcile: Callable[[Intent], Any] | None = None,
        name: str | None = None,
        description: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        fresh: "Callable[[], Tool] | None" = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Create a tool. Raises TypeError or ValueError for invalid arguments.

        Args:
            function: plain or coroutine function; the model sees its arguments by name and type.
            kind: side effects of a call, see `Kind`.
            timeout: maximum seconds of a call.
            memory: bytes of data that a call may allocate in a tool process; not enforced for functions that run
                elsewhere.
            max_output: maximum characters of a result.
            reconcile: for a tool with effects, plain or coroutine function: it receives an `Intent`, and returns the
                result of the call or `NOT_DONE`.
            name: by default the function's.
            description: description for the model, by default the docstring.
            parameters: JSON schema of the arguments, where it comes from elsewhere: the function then receives all
                arguments unchanged, and validates them itself.
            fresh: creates such a tool with a state of its own, for each episode; by default all episodes share this
                one.
            prepare: called before the first call, in a thread, without a timeout.
        """
        self.function = self.__wrapped__ = function
        self.kind: Kind = kind
        self.timeout = float(timeout)
        self.memory = memory
        self.max_output = max_output
        self.reconcile = reconcile
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self._fresh = fresh
        self._prepare = prepare
        self._preparing = threading.Lock()
        self._description = description
        self._schema = None if parameters is None else dict(parameters)
        self.__doc__ = function.__doc__
        self.__module__ = getattr(function, "__module__", __name__)
        self.__qualname__ = getattr(function, "__qualname__", self.name)
        self._check()
        self._parameters = Parameters(function)

    def _check(self) -> None:
        kind = deferred(self.function)
        if kind not in (None, "a coroutine"):
            raise TypeError(f"tool {self.name}: it is {kind} function; return one result instead")
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool {self.name!r}: a tool's name is 1 to 64 letters, digits, _ and -: give it a `name`")
        if self.kind not in get_args(Kind):
            raise ValueError(f"tool {self.name}: there is no kind {self.kind!r}: use pure, deterministic or effects")
        if self.timeout <= 0 or self.max_output <= 0 or (self.memory is not None and self.memory <= 0):
            raise ValueError(f"tool {self.name}: its timeout, memory and max_output have to be above 0")
        if self.reconcile is not None and self.kind != "effects":
            raise ValueError(f"tool {self.name}: reconcile is for tools with effects, and it is {self.kind}")

    def __get__(self, instance: Any, owner: type | None = None) -> "Tool":
        """Return the tool of an instance, where the function is a method. Its `reconcile` may be a method, too."""
        if instance is None:
            return self
        bound = copy(self)
        bound.function = bound.__wrapped__ = self.function.__get__(instance, owner)
        if self.reconcile is not None and _takes_two(self.reconcile):
            bound.reconcile = partial(self.reconcile, instance)
        bound.__dict__.pop("description", None)
        bound.__dict__.pop("parameters", None)
        bound._parameters = Parameters(bound.function)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself, without validation and limits, in the caller's thread."""
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<cairn.Tool {self.name}, {self.kind}>"

    @cached_property
    def description(self) -> str:
        """Description of the tool for the model."""
        return self._parameters.description if self._description is None else self._description

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the object of its arguments."""
        return self._parameters.schema if self._schema is None else self._schema

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of chat templates."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def takes_key(self) -> bool:
        """Whether calls receive their idempotency key: a repeated call then takes effect only once."""
        return self._parameters.takes_key

    def for_episode(self) -> "Tool":
        """Return the tool for one episode, with a state of its own where it has one."""
        return self if self._fresh is None else self._fresh()

    async def run(self, arguments: Mapping[str, Any], key: str) -> Any:
        """Call the tool; return a JSON value. `key`: key of the call, the same in every attempt.

        Raises:
            ToolFailed: the call failed; this is its result.
            ToolUnavailable: the tool could not be called.
            ToolLost: its process was killed from outside, and it is not pure.
        """
        if self._prepare is not None:
            await in_a_thread(self._prepare_once, _TO_PREPARE)
        if deferred(self.function) is None:
            path = None if self.kind == "deterministic" else path_of(self.function)
            if path is not None:
                self._arguments(arguments, key)  # a model's mistakes need no process
                return await processes().call(self, path, arguments, key)
            try:
                return await in_a_thread(partial(self.call, arguments, key), self.timeout)
            except TimeoutError:
                raise self.late() from None
        coroutine = self.function(**self._arguments(arguments, key))
        return json_value(self.name, await self._on_the_loop(coroutine), self.max_output)

    def call(self, arguments: Mapping[str, Any], key: str) -> Any:
        """Call a plain function in this thread; return its result as a JSON value. Raises ToolFailed."""
        checked = self._arguments(arguments, key)
        try:
            return json_value(self.name, self.function(**checked), self.max_output)
        except (ToolFailed, ToolUnavailable):
            raise
        except BaseException as error:
            raise self.raised(error) from None

    def _prepare_once(self) -> None:
        with self._preparing:
            if self._prepare is not None:
                self._prepare()
                self._prepare = None

    def renamed(self, name: str, max_output: int) -> "Tool":
        """Return a copy of the tool with another name and output limit."""
        other = copy(self)
        other.name, other.max_output = name, max_output
        return other

    def _arguments(self, arguments: Mapping[str, Any], key: str) -> dict[str, Any]:
        own = {KEY: key} if self.takes_key else {}
        if self._schema is not None:
            return {**arguments, **own}
        try:
            return {**self._parameters.checked(arguments), **own}
        except ValueError as error:
            raise ToolFailed(f"{self.name}: {error}", Reason.ARGUMENTS) from None

    async def _on_the_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.create_task(self._answer(coroutine))
        try:
            done, _ = await asyncio.wait({task}, timeout=self.timeout)
        finally:
            task.cancel()
        if not done:
            raise self.late()
        answer = task.result()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def _answer(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of a coroutine, or its error as a value: some errors would end the loop if raised."""
        try:
            return await coroutine
        except (ToolFailed, ToolUnavailable) as error:
            return error
        except BaseException as error:
            return self.raised(error)

    def late(self) -> ToolFailed:
        """Return the failure of a call that exceeded its timeout."""
        return ToolFailed(f"{self.name}: it took longer than {self.timeout:g} s", Reason.DEADLINE)

    def raised(self, error: BaseException) -> ToolFailed:
        """Return the failure of a call that raised an error."""
        return raised(self.name, error)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Return whether a function takes two arguments, as a method of a class that does not exist yet."""
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    return True


def raised(tool: str, error: BaseException) -> ToolFailed:
    """Return the failure of a call of `tool` that raised an error."""
    try:
        message = str(error)
    except Exception:
        message = ""
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    reason = Reason.MEMORY if isinstance(error, MemoryError) else Reason.RAISED
    return ToolFailed(f"{tool}: {shortened(text, _LONGEST_ERROR)}", reason)


def tool(
    *,
    kind: Kind,
    timeout: float = TIMEOUT,
    memory: int | None = None,
    max_output: int = MAX_OUTPUT,
    reconcile: Callable[[Intent], Any] | None = None,
    name: str | None = None,
    description: str | None = None,
) -> Callable[[Callable[..., Any] | Callable[..., Awaitable[Any]]], Tool]:
    """Decorate a function to make it a tool; for the arguments see `Tool`."""
    return partial(
        Tool,
        kind=kind,
        timeout=timeout,
        memory=memory,
        max_output=max_output,
        reconcile=reconcile,
        name=name,
        description=description,
    )


# The tools of a run, by their names in `rollout.tools`.


def load_tools(names: Sequence[str], options: "ToolOptions") -> dict[str, Tool]:
    """Load tools; return them in order, by the names that models use. Raises BadPlugin."""
    tools: dict[str, Tool] = {}
    for name in names:
        loaded: Any = TOOL.load(name)
        tool: Tool = loaded if isinstance(loaded, Tool) else loaded(options)
        if tool.name in tools:
            raise BadPlugin(f"rollout.tools has two tools named {tool.name!r}: set another `name` for one")
        tools[tool.name] = tool
    return tools
