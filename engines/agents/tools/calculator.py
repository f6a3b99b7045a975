"""The tool `calculator`: the value of an arithmetic expression. Its cost is bounded, so it needs no process."""

import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from cairn.configs.schema.rollout import ToolOptions
from cairn.engines.agents.tools.tool import Tool

_LONGEST = 1000
"""Maximum characters of an expression."""
_MOST_BITS = 4096
"""Maximum size of an integer in bits."""
_MOST_DIGITS = 1000
"""Maximum number of digits, before or after the decimal point, that a number is rounded to."""
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
    reader.nodes = {node: evaluate for node, evaluate in reader.nodes.items() if node in _nodes()}
    return _text(reader.eval(expression.translate(_SPELLINGS).strip()))


def tool(options: ToolOptions) -> Tool:
    """Return the tool of a run."""
    return Tool(calculator, kind="pure")


@cache
def _nodes() -> frozenset[type]:
    """Return the node types of an expression; others, such as f-strings, may use any amount of memory."""
    import ast

    return frozenset({ast.Expr, ast.Constant, ast.UnaryOp, ast.BinOp, ast.Call, ast.Name})


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
    plain = (math.sqrt, abs, _round, min, max, math.exp, math.log, math.sin, math.cos, math.tan, math.floor, math.ceil)
    return {function.__name__.lstrip("_"): _numbers(function) for function in plain}


def _numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_numbers(*values: Any) -> Any:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError("only numbers are computed with")
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise OverflowError("the number is too large")
        return function(*values)

    return of_numbers


def _product(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and a.bit_length() + b.bit_length() > _MOST_BITS:
        raise OverflowError("the number is too large")
    return a * b


def _power(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int) and b > 0 and a.bit_length() * b > _MOST_BITS:
        raise OverflowError("the number is too large")
    return a**b


def _round(number: Any, digits: Any = 0) -> Any:
    if not isinstance(digits, int) or abs(digits) > _MOST_DIGITS:
        raise ValueError(f"a number is rounded to a whole number of digits, {_MOST_DIGITS} at most")
    return round(number, digits) if digits else round(number)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("the expression has no number as its value")
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value)
