"""Tiers contain one another, files that outgrow their share fail a session, and recorded tiers grow old."""

import json
from pathlib import Path

import pytest

from tests import seconds
from tests.seconds import Seconds, named_shares, old_records
from tests.tiers import Tier

ROOT = Path(__file__).parents[1]

TESTS = """
    import time
    import pytest

    def test_quick():
        time.sleep(0.05)

    @pytest.mark.proof
    def test_proof(): ...

    @pytest.mark.slow
    class TestSlow:
        def test_slow(self): ...

        @pytest.mark.proof
        def test_the_closest_mark_counts(self): ...
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with one test file of all tiers."""
    pytester.makeini("[pytest]\nmarkers =\n    proof:\n    slow:\n")
    pytester.makepyfile(test_all=TESTS)
    pytester.syspathinsert(ROOT)
    return pytester


@pytest.mark.parametrize(("tier", "passed"), [(Tier.QUICK, 1), (Tier.PROOFS, 3), (Tier.ALL, 4)])
def test_a_later_tier_contains_the_earlier_ones(session: pytest.Pytester, tier: Tier, passed: int) -> None:
    done = session.runpytest_inprocess("-p", "tests.tiers", "--tier", tier)
    done.assert_outcomes(passed=passed, deselected=4 - passed)


@pytest.mark.parametrize(
    ("marked", "tier", "passed"),
    [
        ("pytest.mark.slow", Tier.PROOFS, {"passed": 1}),
        ("[pytest.mark.timeout(9), pytest.mark.slow]", Tier.PROOFS, {"passed": 1}),
        ("pytest.mark.slow", Tier.ALL, {"passed": 1, "errors": 1}),
        ("pytest.mark.proof", Tier.QUICK, {"passed": 1}),
        ("pytest.mark.proof", Tier.PROOFS, {"passed": 1, "errors": 1}),
        ("[pytest.mark.timeout(9)]", Tier.QUICK, {"passed": 1, "errors": 1}),
    ],
)
def test_a_file_of_which_all_tests_are_later_is_not_imported(
    pytester: pytest.Pytester, marked: str, tier: Tier, passed: dict[str, int]
) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    proof:\n    slow:\n    timeout:\n")
    pytester.makepyfile(test_first="def test_first(): ...")
    pytester.makepyfile(test_other=f"import pytest, no_such_module\n\npytestmark = {marked}\n\ndef test_other(): ...")
    pytester.syspathinsert(ROOT)
    done = pytester.runpytest_inprocess("-p", "tests.tiers", "--tier", tier, "--continue-on-collection-errors")
    done.assert_outcomes(**passed)


def test_a_file_that_takes_more_than_its_share_fails_the_session_unless_others_had_the_machine(
    session: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.makepyfile(test_other="def test_other(): ...")
    monkeypatch.setattr(seconds, "_README", session.makefile(".md", "nothing is named here"))
    monkeypatch.setattr(seconds, "OWN", 0.0)
    done = session.runpytest_inprocess("-p", "tests.tiers", "-p", "tests.seconds", "--shares")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["test_all.py takes *% of all tests' time, more than 5%: *"])
    monkeypatch.setattr(seconds, "OWN", 1.0)
    done = session.runpytest_inprocess("-p", "tests.tiers", "-p", "tests.seconds", "--shares")
    assert done.ret == pytest.ExitCode.OK


def test_a_file_may_take_the_share_at_which_it_is_named() -> None:
    rows = "| `tests/a/test_b.py` | 7.5 % | why |\n| `tests/test_c.py` | 12 % | 3 cases |\ntests/test_d.py takes 9 %"
    assert named_shares(rows) == {"tests/a/test_b.py": 0.075, "tests/test_c.py": 0.12}
    assert all((ROOT / file).exists() for file in named_shares((ROOT / "tests" / "README.md").read_text()))


def test_the_causes_of_a_tests_seconds_add_up() -> None:
    computing = Seconds(wall=10, imports=1, own=4, children=2)
    assert computing.by_cause() == (1, 3, 2, 4)
    beside_children = Seconds(wall=10, imports=0, own=1, children=15)
    assert beside_children.by_cause() == (0, 1, 9, 0)


def test_a_tier_that_passed_too_many_commits_ago_or_never_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "record.jsonl"
    monkeypatch.setattr(seconds, "_RECORD", record)
    monkeypatch.setattr(seconds, "BUDGETS", {"all": 3})
    monkeypatch.setattr(seconds, "_git", lambda *arguments: {"abc..HEAD": "4", "def..HEAD": "3"}.get(arguments[-1], ""))
    assert old_records() == ["no record of the tier 'all' for this history: run make test-all"]

    def note(**fields: object) -> None:
        with record.open("a") as lines:
            lines.write(json.dumps({"tier": "all", "failed": 0, **fields}) + "\n")

    note(commit="abc")
    note(commit="def", failed=1)
    assert old_records() == ["the tier 'all' last passed 4 commits ago, more than 3: run make test-all"]
    note(commit="def")
    assert old_records() == []
