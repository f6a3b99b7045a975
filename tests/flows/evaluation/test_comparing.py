"""When a result is worse than another: by more than chance, question by question."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from cairn.flows.evaluation.comparing import best_first, compare, find_baseline, leaderboard
from cairn.storage.evals import Claim, Evaluation, EvaluationKey, find_or_claim
from cairn.storage.ledger.decisions import Gate
from cairn.storage.opening import open_store
from cairn.storage.records import Environment
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import Store
from tests.flows.written_runs import new_run, write_run


def result(
    store: Store,
    model: str,
    rewards: list[float | None],
    origin: dict[str, Any] | None = None,
    first: int = 0,
    column: str = "reward",
    **settings: Any,
) -> Evaluation:
    """One reward a question, from number `first` on."""
    weights, tokenizer = (hashlib.sha256(name.encode()).hexdigest() for name in (model, "tokenizer"))
    key = EvaluationKey(
        weights=weights,
        tokenizer=tokenizer,
        benchmark="gsm8k",
        settings={"prompt": "a", "dtype": "float32", **settings},
    )
    claim = find_or_claim(store, key)
    assert isinstance(claim, Claim)
    questions = list(range(first, first + len(rewards)))
    rows = pa.table({"prompt_index": questions, column: pa.array(rewards, pa.float32())})
    with claim:
        attempt = claim.attempt()
        return claim.commit(
            attempt,
            outputs=(attempt.write_table("samples.parquet", rows),),
            metrics={"score": sum(one or 0.0 for one in rewards) / len(rewards)},
            values={},
            origin=origin or {"model": model},
            timings={},
            started_at=0.0,
            environment=Environment(device="cpu", threads=1),
        )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path))


def test_the_interval_is_that_of_the_mean_of_the_differences_of_questions(store: Store) -> None:
    """Of 100 questions 40 are answered right by the baseline, and 30 of these by the other: differences -1 for 10."""
    before = result(store, "before", [1.0] * 40 + [0.0] * 60)
    after = result(store, "after", [1.0] * 30 + [0.0] * 70)
    found = compare(store, after, before)
    error = (10 * 0.9**2 + 90 * 0.1**2) ** 0.5 / 99**0.5 / 10
    assert found.difference == pytest.approx(-0.1)
    assert (found.low, found.high) == (pytest.approx(-0.1 - 1.959964 * error), pytest.approx(-0.1 + 1.959964 * error))
    assert found.regressed
    assert not compare(store, after, before, margin=0.1).regressed
    assert compare(store, before, after).verdict == "better"


def test_a_fall_within_chance_is_no_regression(store: Store) -> None:
    before = result(store, "before", [1.0, 0.0] * 50)
    after = result(store, "after", [1.0, 0.0] * 10 + [0.0, 1.0] * 39 + [0.0, 0.0])
    found = compare(store, after, before)
    assert found.difference == pytest.approx(-0.01)
    assert (found.regressed, found.verdict) == (False, "no difference seen")


def test_a_failed_sample_counts_as_wrong(store: Store) -> None:
    before = result(store, "before", [1.0] * 20)
    assert compare(store, result(store, "after", [None] * 10 + [1.0] * 10), before).difference == pytest.approx(-0.5)


def test_results_of_other_questions_do_not_stand_beside_each_other(store: Store) -> None:
    worse, best = result(store, "worse", [0.0, 1.0]), result(store, "best", [1.0, 1.0], dtype="bfloat16")
    other = result(store, "other", [1.0, 1.0], prompt="b")
    assert sorted(best_first([worse, best, other]), key=len) == [[other], [best, worse]]


def test_a_baseline_is_named_by_its_folder_or_the_beginning_of_its_digest(store: Store) -> None:
    one, other = result(store, "one", [0.0]), result(store, "other", [1.0])
    assert find_baseline([one, other], "one") == find_baseline([one, other], one.key.weights[:8]) == one
    assert find_baseline([one, other], "nobody") is None


def test_the_newest_result_is_the_one_that_may_have_regressed(store: Store) -> None:
    for model, right in (("baseline", 50), ("older", 10), ("newer", 49)):
        result(store, model, [1.0] * right + [0.0] * (60 - right))
    standings = leaderboard(store, baseline="baseline")
    assert [one.model for one in standings] == ["baseline", "newer", "older"]
    (newest,) = (one for one in standings if one.newest)
    assert newest.model == "newer"
    assert newest.comparison is not None
    assert not newest.comparison.regressed


def test_a_regression_opens_the_gate_of_its_run_once_and_only_where_asked(tmp_path: Path, store: Store) -> None:
    ledger = new_run(store)
    write_run(ledger, 1)
    result(store, "before", [1.0] * 60)
    result(store, "after", [0.0] * 60, origin={"run": "toy", "iteration": 0})

    def compared(*options: str) -> Result:
        return CliRunner().invoke(app, ["leaderboard", "--store", str(tmp_path), *options])

    assert "worse against before" in compared("--baseline", "before").stderr
    assert ledger.decisions.gates() == {}
    for _ in range(2):
        messages = compared("--baseline", "before", "--gate-on-regression").stderr
    assert "already waits for this reason" in messages
    (gate,) = ledger.decisions.all()
    assert gate.what == Gate(iteration=1, cause="asked")
    assert "toy@0: worse against before, 0.000 after 1.000" in (gate.why or "")
    refused = compared("--gate-on-regression")
    assert (refused.exit_code, "needs --baseline" in refused.stderr) == (2, True)
    unknown = compared("--benchmark", "typo")
    assert (unknown.exit_code, "no result of a benchmark 'typo'" in unknown.stderr) == (2, True)


def test_results_that_cannot_be_compared_are_named(store: Store) -> None:
    """Their keys say that they are of the same questions, and another process has written what they say."""
    one, other = result(store, "one", [1.0]), result(store, "other", [1.0], first=7)
    with pytest.raises(Damaged, match=f"{one.key.folder} and {other.key.folder} have no question in common"):
        compare(store, one, other)
    odd = result(store, "odd", [1.0], column="rewards")
    with pytest.raises(Damaged, match=f"{odd.key.folder} has no column reward of numbers"):
        compare(store, one, odd)


def test_groups_of_one_benchmark_say_what_differs(store: Store) -> None:
    result(store, "first", [1.0], grader="/home/ada/grader.py:grade 39c6")
    result(store, "second", [0.0], grader="/home/ada/grader.py:grade 7b80", dtype="bfloat16")
    assert {one.model: one.differs for one in leaderboard(store)} == {
        "first": "grader grader.py:grade 39c6",
        "second": "grader grader.py:grade 7b80",
    }
