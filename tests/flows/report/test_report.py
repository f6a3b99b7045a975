"""`cairn report` tells what the ledger holds: of forks, failures, runs without evaluations, and damage."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from cairn.flows.reading.episodes import Texts
from cairn.flows.report.blocks import token_blocks
from cairn.flows.report.data import read_history, read_samples, read_tokens
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import Outcome
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.tasks.steps import rules
from examples.quickstart.model import build_tokenizer
from tests.commands import cairn
from tests.flows.report.test_blocks import unpacked
from tests.flows.written_runs import config_of, new_run, write_iteration, write_run


def silent(what: str, done: int, of: int) -> None:
    pass


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    """The finished run `toy`, and `child`, forked from it after its first iteration."""
    ledger = new_run(str(tmp_path_factory.mktemp("store")))
    write_run(ledger, 3)
    assert ledger.lease is not None
    ledger.lease.release(Outcome.COMPLETED)
    config = config_of(ledger)
    warmer = config.model_copy(update={"rollout": config.rollout.model_copy(update={"rollout_temperature": 0.5})})
    inputs, parent = {"data": "0" * 64}, Parent(run="toy", iteration=0)
    Ledger.create(ledger.store, "child", warmer, inputs, parent, rules=rules(warmer))
    return ledger


def report(ledger: Ledger, run: str, *options: str) -> str:
    """The page of a run."""
    file = Path(ledger.store.url.removeprefix("file://"), f"{run}.html")
    result = cairn("report", run, str(file), "--store", ledger.store.url, *options)
    assert result.exit_code == 0, result.output
    return file.read_text()


def test_every_sample_is_a_row_with_what_became_of_it(toy: Ledger) -> None:
    rows = read_samples(toy, silent).rows.to_pylist()
    assert [(row["iteration"], row["group_id"], row["sample_index"]) for row in rows] == [
        (group // 3, group, index) for group in range(9) for index in range(2)
    ]
    first, dropped = rows[0], rows[4]
    assert (first["reward"], first["advantage"], first["fate"], first["reason"]) == (1.0, 1.0, "train", None)
    assert (first["prompt"], first["response"], first["label"]) == ("[0] 2 + 2 =", "4", "4")
    assert (first["prompt_tokens"], first["response_tokens"], first["log_prob"]) == (3, 2, -0.5)
    assert (dropped["reward"], dropped["advantage"]) == (1.0, None)
    assert (dropped["fate"], dropped["reason"]) == ("drop", "zero_std_1")


def test_tokens_are_those_of_the_samples_asked_for(toy: Ledger) -> None:
    samples = read_samples(toy, silent)
    tokens = read_tokens(toy, samples, [1, 9], silent)
    assert tokens.column("row").to_pylist() == [1] * 2 + [9] * 3
    assert tokens.column("advantage").to_pylist() == [-1.0] * 5
    assert tokens.column("version").to_pylist() == [0] * 2 + [1] * 3
    assert tokens.column("log_ratio").null_count == 5, "nothing was scored"


def test_of_long_samples_the_middle_is_left_out_and_short_ones_stay_whole() -> None:
    lengths = [4, 100, 40]
    n = sum(lengths)
    nothing = pa.nulls(n, pa.float32())
    floats = ("advantage", "return", "value", "log_ratio", "ref_log_ratio", "teacher_log_ratio")
    whole = {name: pa.array(range(n), pa.int32()) for name in ("id", "version", "age", "mask")}
    rows = np.repeat([3, 5, 8], lengths)
    log_probs = {"log_prob": pa.array(-np.arange(n, dtype=np.float32))}
    table = pa.table({"row": rows, **whole, **log_probs, **dict.fromkeys(floats, nothing)})
    samples, values = map(unpacked, token_blocks(table, None, most=44))
    assert samples["row"].tolist() == [3, 5, 8]
    assert samples["length"].tolist() == lengths
    assert samples["kept"].tolist() == [4, 20, 20]
    assert samples["head"].tolist() == [4, 15, 15]
    assert values["id"].tolist() == [*range(4), *range(4, 19), *range(99, 104), *range(104, 119), *range(139, 144)]
    np.testing.assert_allclose(values["log_prob"], -values["id"].astype(float), atol=n / 32767)
    assert "value" not in values, "what nobody knows takes no place"


@pytest.mark.parametrize("text", ["Sort 3 1 2.", "שלום \U0001f9d7\U0001f3fd\u200d♀️ näve\u202e \x1b", "\U0001f600" * 3])
def test_the_texts_of_tokens_are_together_the_response(text: str) -> None:
    tokenizer = build_tokenizer(["Sort the digits"])
    texts = Texts(tokenizer)
    ids = np.array(tokenizer(text)["input_ids"])
    assert "".join(texts(ids)) == text
    assert len(texts(ids)) == len(ids)
    assert texts.are_of(ids, text)
    assert not texts.are_of(ids, f"{text}?")


def test_the_page_tells_what_the_run_came_to(toy: Ledger) -> None:
    html = report(toy, "toy", "--price", "2.5")
    for said in (
        "completed",
        "3 of 3 iterations",
        "intact",
        "zero_std_1",
        "heldout",
        "33.3 %",
        "Price",
        "0" * 63 + "3",
    ):
        assert said in html, said
    assert "The run's driver" not in html


def test_a_fork_tells_its_parent_and_what_it_changed(toy: Ledger) -> None:
    html = report(toy, "child")
    assert "forked from toy@0" in html
    assert "1.0 in toy" in html
    history = read_history(Ledger.open(toy.store, "child"), silent)
    assert [one.number for one in history.iterations] == [0]


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), eval={"eval_interval": None, "benchmarks": []})
    write_iteration(ledger, 0, until=Step.REWARD)
    assert ledger.lease is not None
    ledger.lease.release(Outcome.FAILED)
    html = report(ledger, "toy")
    for said in ("failed", "ended with an error", "in iteration 0 before rollout", "has no evaluations", "not decided"):
        assert said in html, said


def test_a_run_without_a_commit_has_a_report(tmp_path: Path) -> None:
    html = report(new_run(str(tmp_path)), "toy")
    for said in ("No iteration has committed", "No sample has been committed", "No group has been judged"):
        assert said in html, said


def test_damage_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path))
    write_iteration(ledger, 0)
    (lost,) = ledger.find(0, Step.ROLLOUT, "00-001").outputs  # type: ignore[union-attr]
    (tmp_path / layout.in_run("toy", lost.path)).unlink()
    result = cairn("report", "toy", str(tmp_path / "page.html"), "--store", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)
    assert (made["samples"], made["findings"]) == (4, 1)
    assert made["bytes"] == (tmp_path / "page.html").stat().st_size
    html = (tmp_path / "page.html").read_text()
    assert "1 finding" in html
    assert html.count(lost.path) >= 2, "among the findings, and beside the samples"


def test_bad_input_is_refused_with_one_sentence(toy: Ledger, tmp_path: Path) -> None:
    store = toy.store.url
    for arguments, said in {
        ("toy", str(tmp_path)): "is a folder; name a file",
        ("toy", str(tmp_path / "no" / "page.html")): "there is no folder",
        ("none",): "there is no run 'none'",
        ("toy", "toy"): "is a run, not a file to write",
    }.items():
        result = cairn("report", *arguments, "--store", store)
        assert result.exit_code == 2
        assert said in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
