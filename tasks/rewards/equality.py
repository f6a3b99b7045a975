r"""Compute the values of answers, and decide whether two are equal. latex2sympy, the parser of math-verify, has to
read an answer as a whole; sympy computes its value.

| answers | are equal where |
|---|---|
| numbers | sympy proves that their difference is 0; decimals are exact, so 0.333 is not 1/3 |
| expressions with unknowns | the same |
| `(1,2)`, `[1,2]`, `\{1,2\}` or `1, 2` | their kinds are, and their members: in order, except in sets and lists |
| `x<2`, `(-\infty,2)`, `x \le 1 or x > 3` | they contain the same numbers |
| equations | one is a multiple of the other |
| matrices | all entries are |

An answer that cannot be read as a whole, or would take long, has no value and equals nothing: powers of powers,
exponents, factorials and binomials of many digits, sums, integrals and limits, deep brackets.
"""

import re
from functools import lru_cache
from math import prod
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, NormalizationConfig, latex2sympy
from sympy.core.relational import Relational

from cairn.tasks.rewards import notation

_DEEPEST = 10
"""Maximum depth of nested brackets. latex2sympy takes half a second at this depth."""
_NORMALIZED = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_CONVERTED = ConversionConfig(lowercase_symbols=False)
_LARGE = re.compile(
    r"\^ ?\{?[-+ ]?\d{5}|\^ ?(?:\{[^{}]*)?[\d)}]\^|\d{5,} ?!|[)}!] ?!|\d{61}|"
    r"\^ ?\{[^{}]*(?:\{[^{}]*\}[^{}]*)*(?:[\d)}e] ?\^|!)|"
    r"\\(?:sum|prod|i+nt|oint|lim|[gl]c[dm]|det|exp|a?r?(?:sin|cos|tan)h)(?![A-Za-z])"
)
_EXPONENT = re.compile(r"([)}]?) ?\^ ?\{? ?[-+]?(\d+)")
_HIGHEST = 100_000
"""Maximum product of the exponents in a text that may be powers of powers."""
_DROPPED = re.compile(r"[A-Za-z] ?['′″\"]|(?<!matrix\})\^ ?\{? ?T(?![A-Za-z])")
"""Primes, and the transposes of what is no matrix: latex2sympy ignores them."""
_BINOMIAL = re.compile(r"\\[dt]?binom|\\choose|\\[PC]\b")
_OF_WHOLE_NUMBERS = re.compile(r"\\[dt]?binom ?\{ ?\d+ ?\} ?\{ ?\d+ ?\}|\{ ?\d+ ?\\choose ?\d+ ?\}")
"""Binomials of integers, which are computed at once; sympy expands all other binomials."""
_INEQUALITY = re.compile(r"[<>≤≥≠]|\\(?:n?leq?|n?geq?|n?l[et]|gt|ne|neq|[lg]eqslant)(?![A-Za-z])|\\in\b")
_DIRECTIONS = {**dict.fromkeys(("\\le", "\\leq", "\\lt"), "<"), **dict.fromkeys(("\\ge", "\\geq", "\\gt"), ">")}
_WRITTEN = {"≤": r"\le ", "≥": r"\ge ", "≠": r"\neq ", r"\leqslant": r"\le ", r"\geqslant": r"\ge "}
_TINY = sympy.Float("1e-40")
_POINTS = (sympy.Rational(17, 13), sympy.Rational(-23, 19), sympy.Rational(5, 71))


@lru_cache(maxsize=4096)
def value_of(answer: str) -> tuple[str, Any] | None:
    """Return the name in an answer, or an empty one, and its value: a sympy object, or a list of them for a list.

    None where no value can be determined. `answer` is in the form that `notation.read` returns.
    """
    if _INEQUALITY.search(answer):
        return _solutions(answer)
    names: set[str] = set()
    values: list[Any] = []
    is_list = False
    parts = notation.members(answer)
    for part in parts:
        stated = notation.stated(part, _number, _equal)
        value = None if stated is None else parsed(stated[1])
        if stated is None or value is None or isinstance(value, Relational):
            return None
        names |= {stated[0]} - {""}
        is_list = isinstance(value, list)
        values += value if is_list else [value]
    if len(names) > 1:
        return None
    return names.pop() if names else "", values if is_list or len(parts) > 1 else values[0]


def are_equal(one: str, other: str) -> bool:
    """Whether two answers, as `notation.read` returns them, can be proved to be equal."""
    try:
        if "=" in one and "=" in other and (equivalent := _same_equation(one, other)) is not None:
            return equivalent
        first, second = value_of(one), value_of(other)
        if first is None or second is None or (first[0] and second[0] and first[0] != second[0]):
            return False
        return same(first[1], second[1])
    except MemoryError:
        raise
    except Exception:  # what sympy cannot decide about such values
        return False


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal."""
    if isinstance(one, list) or isinstance(other, list):
        return isinstance(one, list) and isinstance(other, list) and _same_members(one, other)
    if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
        return (
            (one.left_open, one.right_open) == (other.left_open, other.right_open)
            and same(one.start, other.start)
            and same(one.end, other.end)
        )
    if isinstance(one, sympy.Tuple) and isinstance(other, sympy.Tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
        return one.shape == other.shape and all(map(same, one.flat(), other.flat()))
    if isinstance(one, sympy.Set) and isinstance(other, sympy.Set):
        return one == other or (one.symmetric_difference(other).is_empty is True)
    if isinstance(one, Relational) and isinstance(other, Relational):
        return _same_relation(one, other)
    return isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr) and _same_expression(one, other)


@lru_cache(maxsize=4096)
def parsed(text: str) -> Any:
    """Return what latex2sympy reads; None where it does not read the whole text, or where that would take long."""
    if not text or notation.text_only(text) is not None or _is_large(text):
        return None
    if _DROPPED.search(text):
        return None
    try:
        value = latex2sympy(text, is_real=True, normalization_config=_NORMALIZED, conversion_config=_CONVERTED)
        if isinstance(value, sympy.MatrixBase):
            value = value.applyfunc(_exact)
        elif isinstance(value, sympy.Basic):
            value = _exact(value)
        else:
            return None
        if isinstance(value, sympy.FiniteSet):
            return [_done(member) for member in value.args]
        if isinstance(value, sympy.Tuple) and "[" in (text[0], text[-1].replace("]", "[")):
            return None  # no interval, and no tuple
        return value if isinstance(value, Relational) else _done(value)
    except MemoryError:
        raise
    except Exception:  # the parser and sympy raise all kinds of errors over what a policy writes
        return None


def _exact(expression: sympy.Basic) -> sympy.Basic:
    """Return an expression with fractions in place of decimals."""
    return expression.xreplace({number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)})


def _done(value: Any) -> Any:
    """Return the computed value. Raises ValueError where that would take long, or where the value is no number."""
    if any(
        not power.exp.free_symbols and abs(power.exp) > 99 for power in value.atoms(sympy.Pow) if power.free_symbols
    ):
        raise ValueError("a power of unknowns that is too high")
    value = value.doit()
    if value.has(sympy.nan, sympy.zoo):
        raise ValueError("no number")
    return value


def _is_large(text: str) -> bool:
    if len(text) > notation.LONGEST or _LARGE.search(text) or max(notation.depths(text)) > _DEEPEST:
        return True
    exponents = [(bool(of_group), int(digits)) for of_group, digits in _EXPONENT.findall(text)]
    plain = max((exponent for of_group, exponent in exponents if not of_group), default=1)
    if plain * prod(exponent or 1 for of_group, exponent in exponents if of_group) > _HIGHEST:
        return True
    if _BINOMIAL.search(_OF_WHOLE_NUMBERS.sub("", text)) and re.search(r"\d{3}", text):
        return True
    return bool(_BINOMIAL.search(text) and re.search(r"\d{4}|[!^]", text))


def _number(text: str) -> float | None:
    expression = parsed(text)
    if not isinstance(expression, sympy.Expr) or not expression.is_number or not expression.is_finite:
        return None
    value = complex(expression)
    return value.real if value.imag == 0 else None


def _equal(one: str, other: str) -> bool:
    values = parsed(one), parsed(other)
    return None not in values and same(*values)


def _same_members(one: list[Any], other: list[Any]) -> bool:
    """Whether two lists have equal members, in any order."""
    left = list(other)
    for member in one:
        place = next((i for i, candidate in enumerate(left) if same(member, candidate)), None)
        if place is None:
            return False
        del left[place]
    return not left


def _same_expression(one: sympy.Expr, other: sympy.Expr) -> bool:
    """Whether two expressions are equal: refuted by values at some points, or else proved."""
    if one == other:
        return True
    if one.has(sympy.oo, -sympy.oo) or other.has(sympy.oo, -sympy.oo):
        return False
    difference = one - other
    if difference.is_Rational:
        return bool(difference == 0)
    unknowns = sorted(difference.free_symbols, key=str)
    for shift in range(len(_POINTS) if unknowns else 1):
        points = {unknown: _POINTS[(i + shift) % len(_POINTS)] + i for i, unknown in enumerate(unknowns)}
        at_point = sympy.N(difference.subs(points), 50, maxn=200)
        if at_point.is_number and at_point.is_finite and not abs(at_point) < _TINY:
            return False
    return difference.equals(0) is True or bool(sympy.simplify(difference) == 0)


def _same_equation(one: str, other: str) -> bool | None:
    """Whether two equations are equivalent. None where one of the texts is no equation, or cannot be read."""
    equations = [parsed(text) for text in (one, other)]
    if not all(isinstance(equation, sympy.Eq) for equation in equations) or "approx" in one + other:
        return None
    left, right = (equation.lhs - equation.rhs for equation in equations)
    ratio = sympy.simplify(left / right)
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _same_relation(one: Relational, other: Relational) -> bool:
    """Whether two unsolved inequalities are equivalent: the differences of their sides agree up to a positive
    factor."""
    one, other = (side.reversed if side.func in (sympy.Lt, sympy.Le) else side for side in (one, other))
    ratio = sympy.simplify((one.lhs - one.rhs) / (other.lhs - other.rhs))
    return one.func is other.func and bool(ratio.is_number and ratio.is_positive)


def _solutions(answer: str) -> tuple[str, Any] | None:
    """Return the name of an unknown and the set of numbers that satisfy the inequalities; for a single inequality that
    cannot be solved, an empty name and the inequality itself."""
    for sign, written in _WRITTEN.items():
        answer = answer.replace(sign, written)
    union: Any = sympy.S.EmptySet
    names: set[str] = set()
    for alternative in re.split(r" ?(?:\bor\b|\\lor\b|\\vee\b) ?", answer):
        common: Any = sympy.S.Reals
        for condition in re.split(r" ?(?:\band\b|\\land\b|\\wedge\b) ?", alternative):
            relation = parsed(condition)
            signs = _INEQUALITY.findall(condition)
            if "=" in condition or "\\approx" in condition or len({_DIRECTIONS.get(sign, sign) for sign in signs}) != 1:
                return None
            solved = None if relation is None else _solved(relation, len(signs))
            if solved is None:
                whole = condition == answer and isinstance(relation, Relational) and not isinstance(relation, sympy.Eq)
                return ("", relation) if whole and relation.free_symbols else None
            names.add(solved[0])
            common = sympy.Intersection(common, solved[1])
        union = sympy.Union(union, common)
    if len(names) != 1:
        return None
    return names.pop(), list(union.args) if isinstance(union, sympy.FiniteSet) else union


def _solved(relation: Any, signs: int) -> tuple[str, Any] | None:
    """Return the unknown of linear inequalities in a chain of `signs` signs, and their solutions."""
    if isinstance(relation, sympy.Eq):  # latex2sympy reads an element of a set so
        return (str(relation.lhs), relation.rhs) if isinstance(relation.rhs, sympy.Set) else None
    if not isinstance(relation, (Relational, sympy.And)) or len(relation.free_symbols) != 1:
        return None
    (unknown,) = relation.free_symbols
    common: Any = sympy.S.Reals
    parts = relation.args if isinstance(relation, sympy.And) else [relation]
    if len(parts) != signs:  # sympy leaves out conditions that are always true
        return None
    for part in parts:
        difference = sympy.expand(part.lhs - part.rhs)
        if (
            isinstance(part, sympy.Eq)
            or not difference.is_polynomial(unknown)
            or sympy.degree(difference, unknown) != 1
        ):
            return None
        common = sympy.Intersection(common, part.doit().as_set())
    return str(unknown), common
