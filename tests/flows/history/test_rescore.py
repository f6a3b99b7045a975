"""`rescore`: what the rewards of committed samples would have been, closed forms against what is found."""

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from cairn.flows.cli import app
from cairn.flows.deployments import flows as deployed
from cairn.flows.driver import validation
from cairn.flows.history.rescore import RESCORED
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import REWARD, ROLLOUT
from cairn.storage.opening import open_store
from cairn.storage.upkeep.redaction import redact
from cairn.storage.upkeep.retention import retire
from examples.quickstart.model import build_tokenizer
from tests.flows import written_runs
from tests.flows.written_runs import bytes_of

GRADERS = """
def right(response, label, metadata):
    return float(response == label)


def wrong(response, label, metadata):
    return float(response != label)


def length(sample):
    if len(sample.response_ids) == 4:
        raise ValueError("four")
    return len(sample.response_ids)
"""
LOST = {"group_id": 1, "sample_index": 0}
"""Its generation failed."""
UNFINISHED = 5
"""A group of which a sample was stopped on purpose; a later round grades it."""


def rows_with(table: pa.Table, schema: pa.Schema, of: dict[str, int], **fields: Any) -> pa.Table:
    rows = table.to_pylist()
    return pa.Table.from_pylist([row | (fields if of.items() <= row.items() else {}) for row in rows], schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `graders.py`, a tokenizer and a store with the run `toy` are: three iterations of three groups of two
    samples, graded by `right`, which pays the first of each group."""
    folder = tmp_path_factory.mktemp("rescore")
    (folder / "graders.py").write_text(GRADERS)
    build_tokenizer(["2 + 2 = 4"]).save_pretrained(folder / "model")
    (folder / "model" / "config.json").write_text("{}")
    rollout_table, reward_table = written_runs.rollout_table, written_runs.reward_table

    def sampled(*place: Any) -> pa.Table:
        lost = rows_with(rollout_table(*place), ROLLOUT, LOST, status="failed", error="the engine ended")
        return rows_with(lost, ROLLOUT, {"group_id": UNFINISHED, "sample_index": 1}, status="aborted")

    def graded(*place: Any) -> pa.Table:
        lost = rows_with(reward_table(*place), REWARD, LOST, reward=None, status="failed", error="the engine ended")
        return rows_with(lost, REWARD, {"group_id": UNFINISHED}, reward=None)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(written_runs, "REWARDS", dict.fromkeys(range(3), (1.0, 0.0)))
        patch.setattr(written_runs, "rollout_table", sampled)
        patch.setattr(written_runs, "reward_table", graded)
        ledger = written_runs.new_run("store", reward={"custom_rm_path": "graders.py:right"})
        written_runs.write_run(ledger, 3)
        yield folder


def cairn(*arguments: str | Path, store: str = "store") -> Result:
    return CliRunner().invoke(app, ["rescore", *map(str, arguments), "--store", store])


def answer(*arguments: str | Path, store: str = "store") -> dict[str, Any]:
    result = cairn(*arguments, "--json", store=store)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def figures(samples: int, changed: int, means: tuple[float, float], failed: tuple[int, int]) -> dict[str, Any]:
    return {
        "samples": samples,
        "changed": changed,
        "mean_before": means[0],
        "mean_after": means[1],
        "failed_before": failed[0],
        "failed_after": failed[1],
    }


def test_the_same_grader_changes_nothing_and_nothing_of_the_store_is_changed(folder: Path) -> None:
    before = bytes_of(folder / "store")
    found = answer("toy")
    assert found["iterations"] == {
        "0": figures(6, 0, (2 / 5, 2 / 5), (1, 1)),
        "1": figures(4, 0, (1 / 2, 1 / 2), (0, 0)),
        "2": figures(6, 0, (1 / 2, 1 / 2), (0, 0)),
    }
    assert found["overall"] == figures(16, 0, (7 / 15, 7 / 15), (1, 1))
    assert (found["grader"], found["passed_over"]) == ("graders.py:right", {})
    assert bytes_of(folder / "store") == before


def test_another_grader_changes_every_reward_and_a_sample_that_failed_stays_failed(folder: Path) -> None:
    found = answer("toy@0:1", "--set", "reward.custom_rm_path=graders.py:wrong", "--write", "wrong.parquet")
    assert found["iterations"] == {
        "0": figures(6, 5, (2 / 5, 3 / 5), (1, 1)),
        "1": figures(4, 4, (1 / 2, 1 / 2), (0, 0)),
    }
    written = pq.read_table(folder / "wrong.parquet")
    assert written.schema.names == RESCORED.names
    rows = written.to_pylist()
    lost = [row for row in rows if LOST.items() <= row.items()]
    assert [(row["reward_after"], row["error_after"]) for row in lost] == [(None, "the engine ended")]
    others = [row for row in rows if row not in lost]
    assert all(row["reward_before"] == 1 - row["sample_index"] == 1 - row["reward_after"] for row in others)
    assert {(row["grader"], row["grader_version"]) for row in rows} == {(found["grader"], found["grader_version"])}
    assert UNFINISHED not in {row["group_id"] for row in rows}


def test_a_grader_is_named_in_a_word(folder: Path) -> None:
    for named, option in (("graders.py:wrong", "custom_rm_path"), ("random", "rm_type")):
        found = answer("toy@0:1", "--reward", named)
        assert found == answer("toy@0:1", "--set", f"reward.{option}={named}")
        assert found["grader"] == named


def test_what_length_costs_is_counted_again(folder: Path) -> None:
    """Responses have 2, 3 and 4 tokens by group, where 8 are the longest."""
    found = answer("toy@1", "--set", "reward.overlong_buffer_len=8", "--write", "shaped.parquet")
    assert found["overall"]["changed"] == 4
    for row in pq.read_table(folder / "shaped.parquet").to_pylist():
        cost = (row["group_id"] % 3 + 2) / 8
        assert row["reward_after"] == pytest.approx(row["reward_before"] - cost)


def test_a_grader_gets_whole_samples_and_what_it_fails_over_is_counted(folder: Path) -> None:
    """Group g has responses of g + 2 tokens: 2, 3 and 4, of which the last raise."""
    result = cairn("toy@2", "--set", "reward.custom_rm_path=graders.py:length")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].split() == ["2", "6", "0.5000", "2.5000", "6", "0", "2"]
    assert "6 of 6 samples of run toy get another reward" in result.stdout


def test_a_grader_of_texts_needs_no_tokenizer_unless_thoughts_end_with_a_special_token(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str) -> Any:
        raise LookupError(path)

    rollout_table = written_runs.rollout_table
    with monkeypatch.context() as patch:
        patch.setattr(validation, "load_tokenizer", load)
        assert answer("toy@1", "--reward", "exact_match")["overall"] == figures(4, 0, (1 / 2, 1 / 2), (0, 0))
    tokenizer = build_tokenizer(["2 + 2 = 4"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["</think>"]})
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    ids = tokenizer.encode(r"\boxed{5}</think>It is 4.")

    def thought(*place: Any) -> pa.Table:
        messages = {"response_text": r"\boxed{5}It is 4.", "response_ids": ids}
        per_token = {"log_probs": [-0.5] * len(ids), "loss_mask": [1] * len(ids), "weight_versions": [0] * len(ids)}
        return rows_with(rollout_table(*place), ROLLOUT, {}, **messages, **per_token)

    monkeypatch.setattr(written_runs, "rollout_table", thought)
    monkeypatch.chdir(tmp_path)
    written_runs.write_run(written_runs.new_run("store"), 1)
    assert answer("toy", "--reward", "exact_match")["overall"]["mean_after"] == 1.0


def test_what_is_redacted_or_retired_is_passed_over_with_its_number(folder: Path) -> None:
    shutil.copytree(folder / "store", folder / "kept")
    ledger = Ledger.open(open_store("kept"), "toy")
    redact(ledger, 7)
    found = answer("toy", store="kept")
    assert (found["passed_over"], found["overall"]) == ({"redacted": 2}, figures(14, 0, (6 / 13, 6 / 13), (1, 1)))
    keep = written_runs.config_of(ledger).checkpoint.model_copy(update={"retain_snapshots": 1})
    assert retire(ledger, keep, everything=True)
    result = cairn("toy", store="kept")
    assert result.exit_code == 0, result.output
    assert "6 samples are skipped: the run no longer stores their tables\n" in result.stdout
    assert "2 samples are skipped: they were redacted\n" in result.stdout


def test_code_that_a_ledger_names_runs_only_where_it_is_at_hand_or_the_user_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"reward": {"custom_rm_path": f"{folder}/graders.py:right"}}
    ledger = written_runs.new_run("elsewhere", **options)
    written_runs.write_run(ledger, 1)
    written_runs.write_iteration(ledger, 1, until=Step.REWARD)
    monkeypatch.chdir(tmp_path)
    store = f"{folder}/elsewhere"
    refused = cairn("toy", store=store)
    assert (refused.exit_code, "a store may not name code" in refused.output) == (2, True)
    found = answer("toy", "--set", f"reward.custom_rm_path={folder}/graders.py:right", store=store)
    assert (found["overall"]["samples"], found["passed_over"]) == (6, {"not graded": 6})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["toy", "--set", "rollout.rollout_temperature=2"], "only options of the section reward can be changed here"),
        (["toy", "--set", "reward.rm_typ=math"], "reward.rm_typ is not an option; did you mean reward.rm_type?"),
        (["toy", "--set", "reward.rm_type=maths"], "there is no grader 'maths'"),
        (["toy@3"], "'3' are not iterations of run 'toy'; it has 0 to 2"),
        (["toy@2:1"], "'2:1' are not iterations of run 'toy'; it has 0 to 2"),
        (["toy@last"], "'last' is neither ITER nor A:B, such as 39 or 0:39"),
        (["nobody"], "there is no run 'nobody'"),
        (["toy", "--write", "graders.py"], "graders.py exists already: use another name"),
        (["toy", "--write", "nowhere/a.parquet"], "there is no folder nowhere"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(folder: Path, arguments: list[str], sentence: str) -> None:
    result = cairn(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_flow_leaves_the_table_as_an_artifact(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a server: what it hands to Prefect is taken down."""
    left: dict[str, str] = {}
    monkeypatch.setattr(deployed, "get_run_logger", lambda: logging.getLogger("rescore"))
    monkeypatch.setattr(deployed, "create_markdown_artifact", lambda **fields: left.update(fields))
    form = deployed.RewardOptions.model_validate({"custom_rm_path": "graders.py:wrong"})
    state = deployed.rescore.fn("toy", "0:1", form, "store")
    assert state.is_completed()
    assert (state.message or "").startswith("9 of 10 samples of run toy get another reward from graders.py:wrong")
    assert left["key"] == "rescore-toy"
    assert "| 0 | 6 | 0.4000 | 0.6000 | 5 | 1 | 1 |" in left["markdown"]
