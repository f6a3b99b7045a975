"""Packed rows and rows that ranks share: log-probs, losses and updates are those of padded rows on one rank."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing import ProcessRaisedException
from transformers import AutoConfig, AutoModelForCausalLM

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.training.torch.attention import Segments, model_problems, packing_problems, use_packed_attention
from cairn.engines.types.types import TrainBatch
from tests.architectures import ARCHITECTURES, VOCABULARY, Architecture, architecture
from tests.engines.training.builders import make_batch, make_engine, weights_of
from tests.engines.training.context_cases import CASES, LAYOUTS, interrupted, launched, resumed, run_cases, save_models
from tests.engines.training.ranks import run_ranks
from tests.tiers import Tier, marks

pytestmark = pytest.mark.timeout(900)  # the first test waits for a launch

BOUND = 1e-5
ALGORITHM = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.05, entropy_coef=0.01)
WINDOWED = replace(architecture("mistral"), config={**architecture("mistral").config, "sliding_window": 16})
OF_THEIR_OWN = {"qwen3_next", "qwen3_5", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v32", "deepseek_v4"}
"""Architectures whose tokens depend on others by a recurrent state, a convolution, an indexer's choice or compressed
keys."""


def batch_of(count: int = 14) -> TrainBatch:
    batch = make_batch(count, old=True, rollout=True, ref=True)
    return replace(batch, input_ids=[ids % VOCABULARY for ids in batch.input_ids])


def largest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of two kinds of tensors by name."""
    assert found.keys() == expected.keys()
    return max(float((torch.as_tensor(found[name]) - torch.as_tensor(expected[name])).abs().max()) for name in found)


def outcome(folder: Path, packed: bool) -> tuple[np.ndarray, dict[str, float], dict[str, torch.Tensor]]:
    engine = make_engine(
        folder, algorithm=ALGORITHM, max_tokens_per_gpu=120, sequence_packing=packed, adam_eps=BOUND, clip_grad=0.1
    )
    scores = np.concatenate(engine.score(batch_of(), "actor"))
    metrics = engine.train(batch_of(), num_steps=2, expected_version=0, input_digest="d").metrics
    return scores, metrics, weights_of(engine)


def chosen() -> Iterator[Any]:
    for one in (replace(WINDOWED, name="windows"), *ARCHITECTURES):
        quick = one.name in ("qwen3", "deepseek_v3", "windows")
        yield pytest.param(one, marks=() if quick else pytest.mark.slow, id=one.name)


@pytest.mark.parametrize("of", chosen())
def test_packed_rows_train_as_padded_ones_or_the_reason_is_given(of: Architecture, tmp_path: Path) -> None:
    folder = of.save(tmp_path / "model")
    problems = list(packing_problems(str(folder), 1))
    if of.name in OF_THEIR_OWN:
        assert "training.sequence_packing needs attention that keeps samples apart" in problems[0]
        return
    assert not problems
    (scores, metrics, weights), (packed_scores, packed_metrics, packed_weights) = (
        outcome(folder, packed) for packed in (False, True)
    )
    np.testing.assert_allclose(packed_scores, scores, atol=BOUND, rtol=0)
    assert packed_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert largest(packed_weights, weights) <= BOUND


def test_an_unpacked_row_would_attend_across_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The witness that the comparison shows it."""
    folder = architecture("qwen3").save(tmp_path / "model")
    alone, _, _ = outcome(folder, packed=True)
    whole = "cairn.engines.training.torch.attention.pairwise"
    monkeypatch.setattr(whole, lambda bounds: [(bounds[0], bounds[-1])])
    across, _, _ = outcome(folder, packed=True)
    assert np.abs(across - alone).max() > 1e-2


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("context")
    save_models(work)
    return work


@pytest.fixture(scope="module")
def one(work: Path) -> dict[str, Any]:
    threads = torch.get_num_threads()
    report = run_cases(work, 0, 1, 1)
    torch.set_num_threads(threads)
    return report


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "4 ranks, CP 2" else marks(Tier.ALL)) for name in LAYOUTS],
)
def shared(request: pytest.FixtureRequest, work: Path) -> dict[str, Any]:
    run_ranks(launched, work, request.param, world_size=LAYOUTS[request.param][0])
    report: dict[str, Any] = json.loads((work / f"{request.param}.json").read_text())
    return report


@pytest.mark.proof
def test_ranks_that_share_sequences_score_and_train_as_one(one: dict[str, Any], shared: dict[str, Any]) -> None:
    wrong = []
    for name, case in CASES.items():
        found, expected = shared[name], one[name]
        exact = case.get("dtype") != "bfloat16"
        bound, rel = (BOUND, 1e-4) if exact else (0.1, 1e-2)
        kinds = [found["scores"], expected["scores"]]
        differences = [np.abs(np.subtract(a, b)).max() for a, b in zip(*kinds, strict=True)]
        if max(differences) > bound:
            wrong.append(f"{name}: scores differ by {max(differences)}")
        names = found["metrics"] if exact else ("loss", "grad_norm")
        for metric in names:
            if found["metrics"][metric] != pytest.approx(expected["metrics"][metric], rel=rel, abs=1e-6):
                wrong.append(f"{name}: {metric} is {found['metrics'][metric]}, not {expected['metrics'][metric]}")
        if exact and (difference := largest(found["weights"], expected["weights"])) > BOUND:
            wrong.append(f"{name}: weights differ by {difference}")
    assert not wrong


@pytest.mark.proof
def test_updates_after_a_kill_end_in_the_bits_of_uninterrupted_ones(work: Path) -> None:
    with pytest.raises(ProcessRaisedException, match="SIGKILL"):
        run_ranks(interrupted, work, world_size=4)
    run_ranks(resumed, work, world_size=4)
    assert (work / "after the kill").read_text() == (work / "straight").read_text()


def test_models_whose_samples_depend_on_their_row_are_named() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    reasons: list[tuple[str, dict[str, Any], str]] = [
        ("llama4_text", {}, "has layers of kind chunked_attention"),
        ("gemma2", {}, "caps its scores"),
        ("mamba2", {}, "has layers of kind linear_attention"),
        ("bloom", {}, "is its own"),
        ("llama", {"rope_parameters": dynamic}, "scales positions by the longest sample of a pass"),
    ]
    for kind, options, reason in reasons:
        problems = list(model_problems(AutoConfig.for_model(kind, **options), 1))
        assert [reason in problem for problem in problems] == [True], (kind, problems)


def test_a_model_that_views_its_attention_reads_packed_rows() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    sizes |= {"kv_channels": 8, "vocab_size": 64, "num_local_experts": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", **sizes)).eval()
    assert list(model_problems(model.config, 1)) == []
    rows = [torch.arange(3, 12)[None], torch.arange(20, 32)[None]]
    positions = torch.cat([torch.arange(row.shape[1]) for row in rows])[None]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row).logits for row in rows], 1)
        use_packed_attention(model)
        segments = Segments([9, 12], torch.device("cpu"), None)
        packed = model(input_ids=torch.cat(rows, 1), position_ids=positions, segments=segments, use_cache=False).logits
    assert (packed - alone).abs().max() <= BOUND


def test_a_config_without_a_number_of_heads_is_named() -> None:
    config = SimpleNamespace(model_type="llama")
    config.get_text_config = lambda: config
    assert list(model_problems(config, 1)) == []  # type: ignore[arg-type]
    (problem,) = model_problems(config, 2)  # type: ignore[arg-type]
    assert "llama has no number of heads" in problem


def test_a_rotation_that_is_no_name_is_no_reason_and_breaks_nothing() -> None:
    for rotation in ({"rope_type": ["dynamic"]}, {"rope_type": {}}, {"full_attention": {"rope_type": []}}):
        assert list(model_problems(AutoConfig.for_model("llama", rope_parameters=rotation), 1)) == []


def test_heads_that_ranks_cannot_divide_are_named(tmp_path: Path) -> None:
    folder = architecture("qwen3").save(tmp_path / "model")
    assert list(packing_problems(str(folder), 2)) == []
    (problem,) = packing_problems(str(folder), 3)
    assert "context_parallel_size is 3, which must divide 4 attention heads" in problem
