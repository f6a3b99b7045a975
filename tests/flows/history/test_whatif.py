"""`whatif`: the advantages that another algorithm would have given, against closed forms and against runs of that
algorithm."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from cairn.flows.history.whatif import COMPARED, what_if
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.opening import open_store
from cairn.storage.upkeep.redaction import redact
from cairn.storage.upkeep.retention import retire
from cairn.tasks.batch.batch import arrays
from tests.flows import written_runs
from tests.flows.written_runs import bytes_of, config_of
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

ESTIMATORS = """
def opposite(batch, config):
    found = batch.spread([2 * (reward < 0.5) - 1 for reward in batch.rewards])
    return found, found
"""
RLOO = "algorithm.advantage_estimator=rloo"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `mine.py` and a store with the run `toy` are: three iterations of two trained groups of 2 and 3 tokens,
    rewards 1 and 0, advantages +1 and −1."""
    folder = tmp_path_factory.mktemp("whatif")
    (folder / "mine.py").write_text(ESTIMATORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        written_runs.write_run(written_runs.new_run("store"), 3)
        yield folder


def cairn(*arguments: str | Path, store: str = "store") -> Result:
    return CliRunner().invoke(app, ["whatif", *map(str, arguments), "--store", store])


def answer(*arguments: str | Path) -> dict[str, Any]:
    result = cairn(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refusal(*arguments: str | Path, store: str = "store") -> str:
    result = cairn(*arguments, store=store)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_advantages_that_would_have_been_the_same_are_said_to_be_and_the_store_stays_as_it_is(folder: Path) -> None:
    """Of rewards 1 and 0 each is 1 from the mean of the others, which is just what the ledger has."""
    before = bytes_of(folder / "store")
    found = answer("toy@1", "--set", RLOO)
    assert found["options"] == {"algorithm.advantage_estimator": {"before": "grpo", "after": "rloo"}}
    same = {"size_before": 1, "size_after": 1, "sign_flips": 0, "zero_before": 0, "zero_after": 0, "correlation": 1}
    assert found["overall"] == {"samples": 4, "trained_tokens": 10, "reward": 0.5, **same}
    assert found["groups"]["3"] == {"samples": 2, "trained_tokens": 4, "reward": 0.5, **same}
    assert list(found["groups"]) == ["3", "4"]
    assert bytes_of(folder / "store") == before


def test_flips_zeros_and_correlation_are_those_of_tokens(folder: Path) -> None:
    raw = answer("toy@0", "--set", "algorithm.rewards_normalization=false")["overall"]
    assert (raw["size_after"], raw["zero_after"], raw["sign_flips"], raw["correlation"]) == (0.5, 0.5, 0, 1)
    opposite = answer(
        "toy@0", "--set", "algorithm.advantage_estimator=mine.py:opposite", "--write", folder / "opposite.parquet"
    )
    assert (opposite["overall"]["sign_flips"], opposite["overall"]["correlation"]) == (1, -1)
    assert [sample["sign_flips"] for sample in opposite["samples"]] == [2, 2, 3, 3]
    assert [sample["advantage_after"] for sample in opposite["samples"]] == [-1, 1, -1, 1]
    rows = pq.read_table(folder / "opposite.parquet")
    assert rows.schema.names == COMPARED.names
    assert rows["advantages_before"].to_pylist() == [[1] * 2, [-1] * 2, [1] * 3, [-1] * 3]
    assert rows["advantages_after"].to_pylist() == [[-1] * 2, [1] * 2, [-1] * 3, [1] * 3]


def test_people_get_a_table_of_groups_or_of_the_samples_of_one_and_a_sentence(folder: Path) -> None:
    shown = cairn("toy@0", "--set", "algorithm.rewards_normalization=false", "--limit", "1").stdout
    assert "1 more groups: --limit 2 shows all" in shown
    assert " ".join(shown.splitlines()[1].split()) == "0 2 0.5000 1.0000 0.5000 0.0 % 0.0 % 50.0 % 1.0000"
    assert "advantages: 0 → 0.5" in shown
    assert shown.splitlines()[-1] == (
        "with algorithm.rewards_normalization=false, 0.0 % of the 10 trained tokens of iteration 0 of run toy change "
        "the sign of their advantage, and 0.0 % → 50.0 % have none; the correlation is 1.0000"
    )
    samples = cairn("toy@0", "--set", RLOO, "--group", "1").stdout.splitlines()
    assert samples[2].split() == ["1", "3", "0.0000", "-1.0000", "-1.0000", "0"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["toy@x"], "'toy@x' is not RUN[@ITER], such as quickstart@19"),
        (["toy@7"], "run 'toy' has no advantages of iteration 7; it has those of iterations 0 to 2"),
        (["toy@0", "--set", "reward.rm_type=math"], "only options of the section algorithm can be changed here"),
        (["toy@0", "--set", "algorithm.entropy_coef=0.1"], "advantages do not depend on algorithm.entropy_coef"),
        (
            ["toy@0", "--set", "algorithm.loss_type=sft_loss"],
            "the run learns from responses, but with these options it would learn from demonstrations",
        ),
        (
            ["toy@0", "--set", "algorithm.advantage_estimator=dpo"],
            "the run learns from responses, but with these options it would learn from preferences",
        ),
        (["toy@0", "--set", "algorithm.gama=0.1"], "algorithm.gama is not an option; did you mean algorithm.gamma?"),
        (
            ["toy@0", "--set", "algorithm.gamma=0.9"],
            "algorithm.gamma (0.9) has no effect while algorithm.advantage_estimator",
        ),
        (
            ["toy@0", "--set", "algorithm.advantage_estimator=ppo"],
            "algorithm.advantage_estimator=ppo needs values, which iteration 0 of run 'toy' has not scored: a fork",
        ),
        (
            ["toy@0", "--set", RLOO, "--set", "algorithm.kl_coef=0.1"],
            "algorithm.kl_coef needs old_log_probs, which iteration 0 of run 'toy' has not scored; "
            "algorithm.use_rollout_logprobs=true uses",
        ),
        (["toy@0", "--set", RLOO, "--group", "9"], "iteration 0 of run toy did not train on group 9"),
        (["toy@0", "--write", "mine.py"], "mine.py exists already: use another name"),
    ],
)
def test_what_cannot_be_told_is_said_in_a_sentence(folder: Path, arguments: list[str], says: str) -> None:
    assert says in refusal(*arguments)


def test_code_that_only_the_ledger_names_runs_where_a_ledger_may_name_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere.py").write_text(ESTIMATORS)
    path = f"{tmp_path / 'elsewhere.py'}:opposite"
    written_runs.write_run(written_runs.new_run("store", "own", algorithm={"advantage_estimator": path}), 1)
    assert "a store may not name code outside the working folder" in refusal("own@0")
    assert answer("own@0", "--set", f"algorithm.advantage_estimator={path}")["overall"]["sign_flips"] == 1
    assert answer("own@0", "--set", RLOO)["overall"]["sign_flips"] == 0


def test_tables_that_are_not_there_any_more_are_named(folder: Path) -> None:
    ledger = written_runs.new_run("store", "gone")
    written_runs.write_run(ledger, 3)
    redact(ledger, 7)
    assert "some samples that iteration 2 of run 'gone' trained on were redacted (decision 1)" in refusal(
        "gone@2", "--set", RLOO
    )
    assert retire(ledger, config_of(ledger).checkpoint.model_copy(update={"retain_snapshots": 1}), everything=True)
    result = cairn("gone@0", "--set", RLOO)
    assert (result.exit_code, "run 'gone' deletes its older files" in result.stderr) == (1, True)


ALGORITHMS: list[dict[str, Any]] = [
    {"advantage_estimator": "rloo", "kl_coef": 0.2},
    {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9},
]


def test_it_tells_bit_for_bit_what_a_run_of_that_algorithm_has(tiny_assets: Path, tmp_path: Path) -> None:
    """The first iteration of a run depends on its algorithm in its advantages alone."""
    stores = []
    for index, algorithm in enumerate(ALGORITHMS):
        stores.append(str(tmp_path / f"store{index}"))
        # Both score the reference model, as kl_coef needs.
        wanted = {"use_rollout_logprobs": True, **algorithm}
        if "kl_coef" not in wanted:
            wanted |= {"use_kl_loss": True, "kl_loss_coef": 0.1}
        with tiny_context(stores[-1], tiny_config(tiny_assets, algorithm=wanted)) as (run, _):
            iteration(run, DirectSteps(run), 0)
    ledgers = [Ledger.open(open_store(store), "tiny") for store in stores]
    for ledger in ledgers:
        for other, algorithm in zip(ledgers, ALGORITHMS, strict=True):
            back = {"kl_coef": 0.0, "gamma": 1.0, "normalize_advantages": False, "use_kl_loss": False}
            changed = back | {"kl_loss_coef": 0.0} | algorithm
            overrides = [f"algorithm.{name}={json.dumps(value)}" for name, value in changed.items()]
            _, rows = what_if(ledger, 0, overrides)
            committed = other.find(0, Step.ADVANTAGE)
            assert committed is not None
            table = read_table(other.store, "tiny", committed.outputs[0])
            for column in ("advantages", "returns"):
                left, right = arrays(rows, f"{column}_after"), arrays(table, column)
                assert [values.tobytes() for values in left] == [values.tobytes() for values in right]
            before, after = (np.concatenate(arrays(rows, f"advantages_{when}")) for when in ("before", "after"))
            assert (before == after).all() == (other is ledger)
