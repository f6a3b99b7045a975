"""What a tool takes: read off the signature and the docstring of its function, told to models as JSON schema, and held
against what they ask for."""

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

KEY = "idempotency_key"
"""Name of the parameter that is no business of the model: the call's own key, the same in every attempt."""
_MOST_ERRORS = 5
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Parameters:
    """Of a function. Types and docstring are looked at when they are first asked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises TypeError where the function takes arguments that have no name."""
        self._function = function
        self._signature = inspect.signature(function)
        for parameter in self._signature.parameters.values():
            if parameter.kind not in (*_NAMED, inspect.Parameter.VAR_KEYWORD):
                raise TypeError(
                    f"a tool's arguments have names, and {parameter} of {getattr(function, '__qualname__', function)} "
                    "has none: let it be an ordinary parameter"
                )

    @property
    def takes_key(self) -> bool:
        """Whether it is given the call's idempotency key."""
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
        """What the docstring says of the function, without what it says of its arguments."""
        return self._docstring[0]

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as the function's types have them. Raises ValueError, which says what does not fit."""
        from pydantic import ValidationError
        from pydantic_core import ArgsKwargs

        if not isinstance(arguments, Mapping):
            raise ValueError(f"its arguments have to be an object, and not {type(arguments).__name__}")
        try:
            found: dict[str, Any] = self._adapter.validator.validate_python(ArgsKwargs((), dict(arguments)))
        except ValidationError as error:
            raise ValueError(self._told(error)) from None
        return found

    def _told(self, error: Any) -> str:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        told = []
        for one in errors[:_MOST_ERRORS]:
            place = ".".join(map(str, one["loc"]))[:100]
            if one["type"].startswith("missing") and len(one["loc"]) == 1:
                told.append(f"{place} is missing")
            elif one["type"] == "unexpected_keyword_argument":
                told.append(f"there is no argument {place}")
            else:
                told.append(f"{place}: {one['msg'][:200]}")
        if len(errors) > _MOST_ERRORS:
            told.append(f"and {len(errors) - _MOST_ERRORS} more")
        return f"{'; '.join(told)} (it takes {', '.join(self.schema['properties']) or 'nothing'})"

    @cached_property
    def _docstring(self) -> tuple[str, dict[str, str]]:
        import docstring_parser

        found = docstring_parser.parse(inspect.getdoc(self._function) or "")
        parts = [part for part in (found.short_description, found.long_description) if part]
        return "\n".join(parts), {one.arg_name: one.description for one in found.params if one.description}

    @cached_property
    def _adapter(self) -> Any:
        """Checks arguments by a function of the same signature, which returns what it is given."""
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

        given: Any = function
        given.__signature__ = self._signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
        given.__annotations__ = {one.name: one.annotation for one in parameters}
        return TypeAdapter(given)


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where the annotations are: of an object that is called, its class has them."""
    while hasattr(function, "func"):  # partial
        function = function.func
    if inspect.isroutine(function):
        return function
    called: Callable[..., Any] = type(function).__call__
    return called


def _without_titles(schema: Any, names: bool = False) -> Any:
    """`names`: the keys are names of properties, and one may be called `title`."""
    if isinstance(schema, list):
        return [_without_titles(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, key in ("properties", "$defs"))
        for key, value in schema.items()
        if names or key != "title"
    }
