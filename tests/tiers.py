"""Three tiers of tests, each a command with a budget. A later tier contains the earlier ones.

| tier | command | two cores | contains |
|---|---|---|---|
| `quick` | `make test` | 10 min | what runs in pytest's own process, and one whole path through every real part |
| `proofs` | `.ci/run` | 30 min | the proofs of what Cairn promises: tests marked `proof` |
| `all` | `make test-all` | 75 min | every architecture, layout, benchmark, chaos cell: tests marked `slow` |

A test's tier is that of the closest of its marks: of its case, its function, its module. So one test of a module
marked `slow` can be marked `proof`, and one case of such a test `slow`.
Without `--tier` pytest runs all tests of the files that it is given.
"""

import ast
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any

import pytest


class Tier(StrEnum):
    """In the order of their budgets."""

    QUICK = "quick"
    PROOFS = "proofs"
    ALL = "all"


MARKS = {"proof": Tier.PROOFS, "slow": Tier.ALL}
"""Marks of tests, by the first tier that runs them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", type=Tier, choices=list(Tier), default=Tier.ALL, help="which tests run (tests/tiers.py)")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which every test belongs to a later tier: their imports alone take seconds."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    return True if _earliest(collection_path.read_text()) not in _wanted(config) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of later tiers."""
    wanted = _wanted(config)
    later = [item for item in items if tier_of(item) not in wanted]
    if later:
        items[:] = [item for item in items if tier_of(item) in wanted]
        config.hook.pytest_deselected(items=later)


def tier_of(item: pytest.Item) -> Tier:
    """The first tier that runs the test."""
    of_case = item.callspec.marks if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    found = chain(of_case, item.iter_markers())  # which gives those of a function before those of its case
    return next((MARKS[mark.name] for mark in found if mark.name in MARKS), Tier.QUICK)


def marks(tier: Tier) -> list[pytest.MarkDecorator]:
    """The marks of a case of `pytest.param` that this tier is the first to run."""
    return [getattr(pytest.mark, name) for name, first in MARKS.items() if first == tier]


def led_by(first: tuple[Any, ...], *others: tuple[Any, ...]) -> list[Any]:
    """Cases for `parametrize` of which the first runs in its function's tier and the others only in `Tier.ALL`."""
    return [first, *(pytest.param(*case, marks=marks(Tier.ALL)) for case in others)]


def selected(request: pytest.FixtureRequest, parameter: str) -> list[Any]:
    """Values of a parameter that tests of the requesting module run with this time, each once, in their order: what a
    module's fixture has to prepare."""
    values = [
        item.callspec.params[parameter]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and parameter in item.callspec.params
    ]
    return [value for index, value in enumerate(values) if value not in values[:index]]


def _wanted(config: pytest.Config) -> list[Tier]:
    return list(Tier)[: list(Tier).index(config.getoption("--tier")) + 1]


def _earliest(source: str) -> Tier:
    """The earliest tier that a test of a file can belong to, by its `pytestmark` and the marks of its tests."""
    if "\npytestmark = " not in source:
        return Tier.QUICK
    named = [
        node.attr
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
        for node in ast.walk(statement.value)
        if isinstance(node, ast.Attribute)
    ]
    tier = next((MARKS[name] for name in named if name in MARKS), Tier.QUICK)
    may_be_closer = "mark.proof" in source or "marks(" in source
    return Tier.PROOFS if tier is Tier.ALL and may_be_closer else tier
