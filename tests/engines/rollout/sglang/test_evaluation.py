"""An evaluation by SGLang: every sample of the result has its tokens and their log-probs."""

from pathlib import Path

import pytest

from cairn.configs.schema.evaluation import EngineOptions
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.models.tokenizers import load_tokenizer
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.weights.checksum import folder_checksum
from cairn.flows.driver.sources import environment
from cairn.flows.evaluation.benchmarks import benchmarks_of
from cairn.flows.evaluation.evaluating import questions_of
from cairn.storage.evals import Claim, find_or_claim, read_samples
from cairn.storage.opening import open_store
from cairn.tasks.evaluation.compute import Served, compute

pytestmark = pytest.mark.proof

BENCHMARK = """
name: digits
title: Digits
prompt: {style: chat, column: prompt}
columns: {label: label}
sampling: {n: 2, temperature: 1.0, max_tokens: 8}
grader: {name: exact_match}
"""


def test_a_result_by_sglang_holds_every_sample_with_tokens_and_log_probs(
    engine: SGLangEngine, sglang_model: Path, tiny_assets: Path, tmp_path: Path
) -> None:
    file, folder = tmp_path / "digits.yaml", str(sglang_model)
    file.write_text(BENCHMARK + f"source: {{data: {tiny_assets / 'heldout.jsonl'}}}\n")
    store, tokenizer, (benchmark,) = open_store(str(tmp_path)), load_tokenizer(folder), benchmarks_of([str(file)])
    questions = questions_of(benchmark, tokenizer)  # type: ignore[arg-type]
    options = EngineOptions(engine="sglang")
    claim = find_or_claim(store, questions.key(folder_checksum(folder, "float32"), "0" * 64, options, folder))
    assert isinstance(claim, Claim)
    with claim:
        served = Served(SampleEngine(engine.open, engine.abort).generate, engine.environment)
        result = compute(claim, questions, tokenizer, lambda: served, {"model": folder}, environment())
    rows = read_samples(store, result).to_pylist()
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [(i, j) for i in range(4) for j in (0, 1)]
    assert all(len(row["log_probs"]) == len(row["response_ids"]) > 0 for row in rows)
    assert all(value <= 0 for row in rows for value in row["log_probs"])
    assert (result.key.settings["engine"], "sglang" in result.environment.versions) == ("sglang", True)
    assert result.metrics["interval_low"] <= result.metrics["score"] <= result.metrics["interval_high"]
    assert find_or_claim(store, result.key) == result
