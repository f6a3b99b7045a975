"""One test of a property over a table of cases, whose failure names every case that fails."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]


def cases(names: str | tuple[str, ...], table: Iterable[Any]) -> Callable[[Test], Test]:
    """As `pytest.mark.parametrize`, but one test, which goes through the whole table before it fails. Its fixtures are
    made once for all cases."""
    names = (names,) if isinstance(names, str) else names
    rows = [row if len(names) > 1 else (row,) for row in table]
    assert rows, "a test of no cases cannot fail"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def through_the_table(**fixtures: Any) -> None:
            failed = []
            for row in rows:
                try:
                    test(**dict(zip(names, row, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    why = " ".join(str(error).split())
                    failed.append(f"{', '.join(map(repr, row)):.200}\n    {type(error).__name__}: {why:.400}")
            if failed:
                pytest.fail(f"{len(failed)} of {len(rows)} cases:\n" + "\n".join(failed), pytrace=False)

        own = inspect.signature(test)
        left = [parameter for name, parameter in own.parameters.items() if name not in names]
        through_the_table.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
        return through_the_table

    return decorate
