"""A test over a table runs every case and fails by the name of each that fails."""

import inspect

import pytest

from tests.tables import cases


def test_every_case_that_fails_is_named_and_those_behind_it_run() -> None:
    ran = []

    @cases(("one", "other"), [(1, 1), (1, 2), (2, 2), (3, 4), (5, 5)])
    def differ(one: int, other: int, fixture: str) -> None:
        ran.append((one, fixture))
        if one == 5:
            pytest.fail("DID NOT RAISE")
        assert one == other

    assert list(inspect.signature(differ).parameters) == ["fixture"]
    with pytest.raises(pytest.fail.Exception) as failed:
        differ(fixture="made")
    assert ran == [(one, "made") for one in (1, 1, 2, 3, 5)]
    named = str(failed.value).splitlines()
    assert named[:2] == ["3 of 5 cases:", "1, 2"]
    assert (named[3], named[5]) == ("3, 4", "5, 5")
    assert "assert 3 == 4" in named[4]
    assert "DID NOT RAISE" in named[6]


def test_a_table_without_cases_is_refused() -> None:
    with pytest.raises(AssertionError, match="no cases"):
        cases("one", [])
