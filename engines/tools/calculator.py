"""`calculator`: the value of an arithmetic expression. What it may cost is bounded, so it needs no process."""

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from cairn.configs.schema.tools import ToolOptions
from cairn.engines.tools.tool import Tool

_LONGEST = 1000
"""Characters of an expression."""
_MOST_BITS = 4096
"""Of a whole number that a power or a product makes."""
_SPELLINGS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**"})


async def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    It knows + - * / // % ** (or ^), parentheses, and the functions sqrt, abs, round, min, max, exp, log, sin, cos, tan,
    floor and ceil; pi and e.

    Args:
        expression: such as (3 + 4) * 12 / 7
    """
    import simpleeval

    if len(expression) > _LONGEST:
        raise ValueError(f"an expression has {_LONGEST} characters at most")
    reader = simpleeval.SimpleEval(operators=_operators(), functions=_functions(), names={"pi": math.pi, "e": math.e})
    return _told(reader.eval(expression.translate(_SPELLINGS).strip()))


def tool(options: ToolOptions) -> Tool:
    """The tool of a run."""
    return Tool(calculator, kind="pure")


@cache
def _operators() -> dict[type, Callable[..., Any]]:
    import ast

    return {
        ast.Add: _numbers(operator.add),
        ast.Sub: _numbers(operator.sub),
        ast.Mult: _numbers(_product),
        ast.Div: _numbers(operator.truediv),
        ast.FloorDiv: _numbers(operator.floordiv),
        ast.Mod: _numbers(operator.mod),
        ast.Pow: _numbers(_power),
        ast.USub: _numbers(operator.neg),
        ast.UAdd: _numbers(operator.pos),
    }


@cache
def _functions() -> dict[str, Callable[..., Any]]:
    plain = (math.sqrt, abs, round, min, max, math.exp, math.log, math.sin, math.cos, math.tan, math.floor, math.ceil)
    return {function.__name__: _numbers(function) for function in plain}


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_numbers(*given: Any) -> Any:
        for value in given:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError("only numbers are computed with")
        return function(*given)

    return of_numbers


def _product(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > _MOST_BITS:
        raise OverflowError("the number is too large")
    return a * b


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and b > 0 and a.bit_length() * b > _MOST_BITS:
        raise OverflowError("the number is too large")
    return a**b


def _told(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("the expression has no number as its value")
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)
