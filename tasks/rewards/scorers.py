"""Scorers of reasoning-gym, which execute nothing.

Some of the scorers evaluate answers, and fields of a row, as Python or by sympy, which executes them as Python too.
Here they get evaluators that accept only numbers, arithmetic and literals, or a formula of a few functions, and no
number that would fill the memory.
"""

import ast
import json
import sys
from collections.abc import Callable
from functools import lru_cache
from types import ModuleType
from typing import Any

import sympy
from reasoning_gym.factory import create_dataset
from reasoning_gym.utils import extract_answer
from simpleeval import EvalWithCompoundTypes
from sympy.parsing.sympy_parser import parse_expr

__all__ = ["extract_answer", "scorer"]

_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant)
_LITERALS = (*_ARITHMETIC, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.expr_context)
_FUNCTIONS = frozenset(
    (
        *("sin", "cos", "tan", "sec", "csc", "cot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh"),
        *("atanh", "exp", "log", "ln", "sqrt", "Abs", "abs", "erf", "erfi", "Integral"),
    )
)
_CONSTANTS = frozenset({"pi", "oo"})
_DIGITS = 100_000
"""Maximum of decimal digits that a formula's value may have, by a bound that is easy to compute."""


@lru_cache(maxsize=256)
def scorer(generator: str, config: str) -> Any:
    """Return the scorer of a generator with a configuration, which is JSON."""
    dataset = create_dataset(generator, **{"size": 1, "seed": 0, **json.loads(config)})
    _executes_nothing(sys.modules[type(dataset).__module__])
    return dataset.score_answer


def _executes_nothing(module: ModuleType) -> None:
    """Replace the evaluators in a generator's module with harmless ones."""
    for name, value in list(vars(module).items()):
        if value is parse_expr:
            vars(module)[name] = _formula
        elif value is sympy:
            vars(module)[name] = _Sympy("sympy")
    vars(module)["eval"] = _literal


class _Sympy(ModuleType):
    """A stand-in for sympy, with a harmless `parse_expr`."""

    def __getattr__(self, name: str) -> Any:
        return _formula if name == "parse_expr" else getattr(sympy, name)


def _literal(text: str) -> Any:
    """Return what `eval` returns for numbers, arithmetic and literals.

    Raises ValueError for anything else, and InvalidExpression for a number that is too large.
    """
    tree = _tree(text)
    # % can write texts of any width.
    _require_only(tree, lambda node: isinstance(node, _LITERALS) and not isinstance(node, ast.Mod), text)
    return EvalWithCompoundTypes(names={}).eval(text, previously_parsed=tree.body)


def _formula(text: str, *arguments: Any, **options: Any) -> Any:
    """Return what `sympy.parse_expr` returns for a formula in letters and well-known functions.

    Raises ValueError for anything else.
    """

    def is_formula(node: ast.AST) -> bool:
        match node:
            case ast.Constant(value=value):
                return isinstance(value, int | float | complex)
            case ast.Name(id=name):
                return len(name) == 1 or name in _FUNCTIONS | _CONSTANTS
            case ast.Call(func=ast.Name(id=name), keywords=[]):
                return name in _FUNCTIONS
        return isinstance(node, (*_ARITHMETIC, ast.expr_context))

    tree = _tree(text)
    _require_only(tree, is_formula, text)
    if _digits(tree.body) > _DIGITS:
        raise ValueError(f"{text[:80]!r} may give a number of more than {_DIGITS} digits")
    return parse_expr(text, *arguments, **options)


def _digits(node: ast.AST) -> float:
    """Return a bound on the decimal digits of a formula's value."""
    match node:
        case ast.Constant(value=value):
            return len(str(value))
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _digits(base) * 10 ** min(_digits(exponent), 100)
        case ast.Name():
            return 1
    return sum(map(_digits, ast.iter_child_nodes(node)))


def _tree(text: str) -> ast.Expression:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"{text[:80]!r} cannot be read: {error}") from None


def _require_only(tree: ast.AST, is_harmless: Callable[[ast.AST], bool], text: str) -> None:
    if not all(map(is_harmless, ast.walk(tree))):
        raise ValueError(f"{text[:80]!r} holds more than is evaluated")
