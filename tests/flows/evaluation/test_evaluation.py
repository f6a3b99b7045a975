"""Evaluation apart from runs: computed once for equal weights, whoever asks, and never twice for a sample."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from cairn.configs.schema.evaluation import Benchmark, EngineOptions
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.flows.evaluation.benchmarks import benchmarks_of
from cairn.flows.evaluation.evaluating import EvaluationResult, evaluate_models
from cairn.flows.evaluation.models import ModelFolder
from cairn.storage.evals import Claim, folders, read_samples
from cairn.storage.ledger.schemas import EVALUATED
from cairn.storage.opening import open_store
from cairn.storage.store.errors import StoreRefused
from cairn.storage.store.store import Store
from tests.commands import cairn
from tests.flows.evaluation.conftest import BENCHMARK
from tests.waiting import wait_for


@pytest.fixture(scope="module")
def benchmark_file(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("benchmark") / "digits.yaml"
    file.write_text(BENCHMARK + f"source: {{data: {tiny_assets / 'heldout.jsonl'}}}\n")
    return file


@pytest.fixture(scope="module")
def first(
    tiny_assets: Path, benchmark_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> "tuple[Store, EvaluationResult]":
    """A store with one result."""
    store = open_store(str(tmp_path_factory.mktemp("store")))
    return store, evaluated(store, tiny_assets / "model", benchmark_file)


def evaluated(
    store: Store, model: Path, file: Path, dtype: Any = "float32", **sections: dict[str, Any]
) -> EvaluationResult:
    benchmarks: list[Benchmark] = benchmarks_of([str(file)], changes=sections)
    (found,) = evaluate_models(store, [ModelFolder(str(model), EngineOptions(dtype=dtype))], benchmarks)
    return found


def test_a_result_holds_every_sample_with_its_tokens_log_probs_seed_and_grader(
    first: "tuple[Store, EvaluationResult]",
) -> None:
    store, found = first
    rows = read_samples(store, found.result)
    assert found.computed
    assert rows.schema.equals(EVALUATED)
    assert [(r["prompt_index"], r["sample_index"]) for r in rows.to_pylist()] == [
        (i, j) for i in range(4) for j in (0, 1)
    ]
    assert len({row["seed"] for row in rows.to_pylist()}) == 8
    for row in rows.to_pylist():
        assert len(row["log_probs"]) == len(row["response_ids"]) > 0
        assert (row["grader"], row["reward"] is None) == ("exact_match", False)
    metrics = found.result.metrics
    assert metrics["score"] == pytest.approx(sum(rows["reward"].to_pylist()) / 8)
    assert (metrics["questions"], metrics["samples"], metrics["n"]) == (4, 8, 2)


@pytest.mark.usefixtures("no_engine")
def test_what_was_computed_is_found(
    first: "tuple[Store, EvaluationResult]", tiny_assets: Path, benchmark_file: Path
) -> None:
    second = evaluated(first[0], tiny_assets / "model", benchmark_file)
    assert not second.computed
    assert second.result == first[1].result


@pytest.mark.usefixtures("no_engine")
def test_equal_weights_in_another_folder_have_the_same_result(
    first: "tuple[Store, EvaluationResult]", tiny_assets: Path, benchmark_file: Path, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_assets / "model").save_pretrained(tmp_path, max_shard_size="100KB")
    tokenizer = AutoTokenizer.from_pretrained(tiny_assets / "model")
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path)
    backend = json.loads((tmp_path / "tokenizer.json").read_text())
    backend["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Left",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
        "pad_to_multiple_of": None,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert evaluated(first[0], tmp_path, benchmark_file).result == first[1].result


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"prompt": {"system": "Answer."}}, marks=pytest.mark.slow),
        pytest.param({"grader": {"name": "math"}}, marks=pytest.mark.slow),
        pytest.param({"sampling": {"temperature": 0.5}}, marks=pytest.mark.slow),
        {"source": {"data": "ROWS@[0:3]"}},
    ],
)
def test_another_prompt_grader_sampling_or_slice_has_a_result_of_its_own(
    first: "tuple[Store, EvaluationResult]", tiny_assets: Path, benchmark_file: Path, changed: dict[str, Any]
) -> None:
    if "source" in changed:
        changed = {"source": {"data": f"{tiny_assets / 'heldout.jsonl'}@[0:3]"}}
    other = evaluated(first[0], tiny_assets / "model", benchmark_file, **changed)
    assert other.computed
    assert other.result.key.weights == first[1].result.key.weights
    assert other.result.key.folder != first[1].result.key.folder


def test_another_number_format_has_a_result_of_its_own(
    first: "tuple[Store, EvaluationResult]", tiny_assets: Path, benchmark_file: Path
) -> None:
    other = evaluated(first[0], tiny_assets / "model", benchmark_file, "bfloat16")
    assert other.computed
    assert other.result.key.settings["dtype"] == "bfloat16"


def test_a_result_keeps_its_table_where_the_store_fails_after_it_took_the_result(
    tiny_assets: Path, benchmark_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, commit = open_store(str(tmp_path)), Claim.commit

    def failing(claim: Claim, *args: Any, **fields: Any) -> None:
        commit(claim, *args, **fields)
        raise StoreRefused("no space left on the device")

    with monkeypatch.context() as patch:
        patch.setattr(Claim, "commit", failing)
        with pytest.raises(StoreRefused):
            evaluated(store, tiny_assets / "model", benchmark_file)
    found = evaluated(store, tiny_assets / "model", benchmark_file)
    assert not found.computed
    assert read_samples(store, found.result).num_rows == 8


def test_samples_that_were_finished_before_a_failure_are_not_sampled_again(
    tiny_assets: Path, benchmark_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Any
) -> None:
    store, requested = open_store(str(tmp_path)), []
    generate = SampleEngine.generate

    def failing(self: Any, samples: Any, *rest: Any) -> Iterator[Any]:
        requested.append({sample.key for sample in samples})
        yield from generate(self, samples[:3] if len(requested) == 1 else samples, *rest)
        if len(requested) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(SampleEngine, "generate", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluated(store, tiny_assets / "model", benchmark_file)
    found = evaluated(store, tiny_assets / "model", benchmark_file)
    assert [len(keys) for keys in requested] == [8, 5]
    columns = ["response_ids", "log_probs", "reward", "seed"]
    assert (
        read_samples(store, found.result)
        .select(columns)
        .equals(read_samples(first[0], first[1].result).select(columns))
    )


def test_commands_say_what_is_wrong_before_anything_starts(tiny_assets: Path, tmp_path: Path) -> None:
    model = tiny_assets / "model"
    for words, why in [
        (("--model", tmp_path / "none", "gsm8k"), "does not exist"),
        (("--model", model, "nosuch"), "there is no benchmark 'nosuch'"),
        (("nosuch", "gsm8k"), "there is no run 'nosuch'"),
        (("--model", model, "gsm8k", "--dtype", "int8"), "--dtype is 'int8'"),
        (("--model", model, "gsm8k", "--every", "2"), "RUN@A:B"),
        (("--model", model, "gsm8k", "--set", "n=2"), "is not SECTION.OPTION=VALUE"),
        (("--model", model, "gsm8k", "-n", "4"), "temperature is 0"),
        (("gsm8k",), "name at least one benchmark"),
    ]:
        ended = cairn("eval", *words, "--store", tmp_path)
        assert ended.exit_code == 2, ended.output
        assert why in ended.stderr, ended.stderr
    assert not list(folders(open_store(str(tmp_path))))


@pytest.mark.usefixtures("no_engine")
def test_results_are_shown_though_there_is_no_baseline_to_hold_them_against(
    first: "tuple[Store, EvaluationResult]", tiny_assets: Path, benchmark_file: Path
) -> None:
    words = ("--model", tiny_assets / "model", benchmark_file, "--dtype", "float32", "--baseline", "nosuch", "--json")
    ended = cairn("eval", *words, "--store", first[0].url)
    assert (ended.exit_code, "no result of nosuch" in ended.stderr) == (2, True), ended.stderr
    assert "Results exist for " in ended.stderr
    assert [one["digest"] for one in json.loads(ended.stdout)] == [first[1].result.digest]


def test_a_leaderboard_ranks_what_can_be_compared(first: "tuple[Store, EvaluationResult]", tiny_assets: Path) -> None:
    ended = cairn("leaderboard", "--store", first[0].url, "--baseline", tiny_assets / "model", "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    ranks = [one["rank"] for one in found if one["metrics"]["questions"] == 4]
    assert ranks[0] == 1
    assert any(one["baseline"] for one in found)
    unknown = cairn("leaderboard", "--store", first[0].url, "--baseline", "nosuch")
    assert (unknown.exit_code, "no result of nosuch" in unknown.stderr) == (2, True)


@pytest.mark.slow
def test_of_two_processes_one_computes_and_what_a_killed_one_finished_stays(
    tiny_assets: Path, benchmark_file: Path, tmp_path: Path
) -> None:
    rows = [
        json.dumps({"prompt": f"Sort the digits {i} in increasing order.", "label": "1"}) + "\n" for i in range(400)
    ]
    (tmp_path / "many.jsonl").write_text("".join(rows))
    words = ["eval", "--model", tiny_assets / "model", benchmark_file, "--data", tmp_path / "many.jsonl"]
    words += ["--set", "sampling.max_tokens=200", "--json", "--store", tmp_path]
    command = [Path(sys.executable).with_name("cairn"), *map(str, words)]
    store = open_store(str(tmp_path))

    def parts() -> list[str]:
        return [path for folder in folders(store) for path in store.find(folder) if path.endswith(".arrow")]

    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(parts()) >= 2, seconds=60)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    stored = parts()
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ)) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=120)[0])[0] for process in both]
    assert sorted(one["computed"] for one in answers) == [False, True]
    assert answers[0]["digest"] == answers[1]["digest"]
    assert answers[0]["epoch"] == 2
    assert stored
