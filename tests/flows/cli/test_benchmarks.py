"""`cairn benchmarks`: what it prints, for people and for machines, and how it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cairn.configs.catalogue import benchmark_names
from cairn.flows.cli import app


def cairn(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["benchmarks", *arguments])


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


def test_all_are_listed_with_what_they_follow_and_whether_their_rows_are_here() -> None:
    listed = cairn().stdout
    assert all(f"\n{name} " in listed for name in benchmark_names())
    assert "minerva_math500 3.1" in listed
    machines = json.loads(cairn("--json").stdout)
    assert [one["name"] for one in machines] == benchmark_names()
    assert all(one["local"] is None for one in machines)


def test_one_is_shown_with_the_question_it_asks_first(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"question": "How many?", "answer": "Seven.\n#### 7"}))
    shown = cairn("gsm8k-5shot", "--data", str(rows)).stdout
    assert shown.endswith("\n#### 624\n\nQuestion: How many?\nAnswer:\n── label\n7\n")
    machine = json.loads(cairn("gsm8k", "--data", str(rows), "--json").stdout)
    assert machine["first"]["label"] == "7"
    assert machine["local_rows"] == 1
    assert set(machine["digests"]) == {"prompt", "sampling", "grader", "source"}


def test_how_to_get_rows_that_are_not_here_is_said() -> None:
    shown = cairn("math500")
    assert shown.exit_code == 0
    assert "hf download HuggingFaceH4/MATH-500 test.jsonl" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gsm"], "there is no benchmark 'gsm'"),
        (["mine.yaml"], "mine.yaml does not exist"),
        (["gsm8k", "--data", "no.jsonl"], "no.jsonl does not exist"),
        (["--data", "rows.jsonl"], "--data needs the name of a benchmark"),
    ],
)
def test_what_is_not_there_is_said_in_a_sentence(arguments: list[str], said: str) -> None:
    refused = cairn(*arguments)
    assert refused.exit_code == 2
    assert said in refused.stderr
