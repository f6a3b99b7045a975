"""Logs for Inspect's viewer: what stands in them, and that Inspect's own reader finds it there."""

import json
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cairn.flows.evaluation.inspect_log import export_inspect
from cairn.storage.evals import Evaluation, read_samples, results
from cairn.storage.opening import open_store
from tests.commands import cairn
from tests.flows.evaluation.conftest import BENCHMARK

HERE = Path(__file__).parent
PYTHON = HERE.parents[3] / ".venv-inspect" / "bin" / "python"


@pytest.fixture(scope="module")
def evaluated(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A store with one result, its log as the command wrote it, and the benchmark."""
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "digits.yaml").write_text(BENCHMARK + f"source: {{data: {tiny_assets / 'heldout.jsonl'}}}\n")
    words = ("eval", "--model", tiny_assets / "model", folder / "digits.yaml", "--store", folder)
    done = cairn(*words, "--export", "inspect", folder / "digits.eval")
    assert done.exit_code == 0, done.stderr
    assert "written for Inspect" in done.stderr
    return folder, folder / "digits.eval", folder / "digits.yaml"


def made(folder: Path) -> tuple[Evaluation, Any]:
    store = open_store(str(folder))
    (result,) = results(store)
    return result, read_samples(store, result)


def entries(file: Path) -> dict[str, Any]:
    with zipfile.ZipFile(file) as log:
        return {name: json.loads(log.read(name)) for name in log.namelist()}


def test_a_log_has_a_file_a_response_and_the_digests_of_what_was_evaluated(evaluated: tuple[Path, Path, Path]) -> None:
    result, rows = made(evaluated[0])
    log = entries(evaluated[1])
    samples = {name: sample for name, sample in log.items() if name.startswith("samples/")}
    assert set(log) - set(samples) == {"_journal/start.json", "summaries.json", "header.json"}
    assert set(samples) == {
        f"samples/{row['prompt_index']}_epoch_{row['sample_index'] + 1}.json" for row in rows.to_pylist()
    }
    assert log["header.json"]["eval"]["metadata"]["weights"] == result.key.weights
    assert log["header.json"]["eval"]["metadata"]["result"] == result.digest
    assert all([event["event"] for event in sample["events"]] == ["model", "score"] for sample in samples.values())


def test_a_result_makes_the_same_bytes_again(evaluated: tuple[Path, Path, Path], tmp_path: Path) -> None:
    result, rows = made(evaluated[0])
    for name in ("one", "two"):
        export_inspect(result, rows, tmp_path / name, "model")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "two"]


def test_a_response_that_failed_has_an_error_and_no_score(evaluated: tuple[Path, Path, Path], tmp_path: Path) -> None:
    result, rows = made(evaluated[0])
    failed = rows.to_pylist()
    failed[0] |= {"reward": None, "error": "no judge today", "status": "failed"}
    table = type(rows).from_pylist(failed, rows.schema)
    export_inspect(result, table, tmp_path / "failed.eval", "model")
    log = entries(tmp_path / "failed.eval")
    sample = log["samples/0_epoch_1.json"]
    assert "scores" not in sample
    assert sample["error"]["message"] == "no judge today"
    assert [event["event"] for event in sample["events"]] == ["model"]
    (score,) = log["header.json"]["results"]["scores"]
    assert (score["scored_samples"], score["unscored_samples"]) == (7, 1)


def test_questions_with_one_id_are_told_apart(evaluated: tuple[Path, Path, Path], tmp_path: Path) -> None:
    result, rows = made(evaluated[0])
    named = [row | {"prompt_id": f"q{row['prompt_index']}"} for row in rows.to_pylist()]
    export_inspect(result, type(rows).from_pylist(named, rows.schema), tmp_path / "named.eval", "model")
    assert "samples/q3_epoch_2.json" in entries(tmp_path / "named.eval")
    same = [row | {"prompt_id": "q"} for row in rows.to_pylist()]
    export_inspect(result, type(rows).from_pylist(same, rows.schema), tmp_path / "same.eval", "model")
    assert len([name for name in entries(tmp_path / "same.eval") if name.startswith("samples/")]) == 8


@pytest.mark.parametrize(
    ("export", "said"),
    [
        (("html", "logs"), "--export html is not a format"),
        (("inspect", "both.eval"), "can contain only one log, but there are 2 results"),
        (("inspect", "digits.yaml"), "is a file, but not a log"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_computed(
    evaluated: tuple[Path, Path, Path], tiny_assets: Path, tmp_path: Path, export: tuple[str, str], said: str
) -> None:
    folder, _, benchmark = evaluated
    place = folder / export[1]
    another = tmp_path / "another.yaml"
    another.write_text(benchmark.read_text().replace("name: digits", "name: another"))
    words = ("eval", "--model", tiny_assets / "model", benchmark, another, "--store", folder / "other")
    refused = cairn(*words, "--export", export[0], place)
    assert (refused.exit_code, said in refused.stderr) == (2, True), refused.stderr
    assert not (folder / "other" / "evals").exists()


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-inspect; make it with `make inspect-env`")
def test_inspect_reads_what_was_evaluated(evaluated: tuple[Path, Path, Path]) -> None:
    result, rows = made(evaluated[0])
    done = subprocess.run([PYTHON, HERE / "read_log.py", evaluated[1]], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout)
    assert (read["status"], read["task"], read["epochs"]) == ("success", "digits", 2)
    assert read["metrics"] == result.metrics
    assert read["metadata"]["weights"] == result.key.weights
    options = rows.to_pylist()
    assert [(one["id"], one["epoch"]) for one in read["samples"]] == [
        (row["prompt_index"], row["sample_index"] + 1) for row in options
    ]
    for one, row in zip(read["samples"], options, strict=True):
        assert one["input"] == row["prompt_text"]
        assert one["target"] == row["label"]
        assert one["response"] == row["response_text"]
        assert one["tokens"] == len(row["response_ids"])
        assert one["stop"] == ("max_tokens" if row["finish_reason"] == "length" else "stop")
        assert one["scores"] == {"exact_match": row["reward"]}
        assert one["events"] == ["model", "score"]
    assert read["apart"] == options[0]["response_text"]
    assert len(read["summaries"]) == 8
