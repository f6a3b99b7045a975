"""The transformers rollout engine on a CUDA device. Needs neither Ray nor Prefect: `pytest --noconftest` runs it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.engines.rollout.transformers.engine import TransformersEngine
from tests.engines.rollout.models import (
    collect,
    configs,
    full_log_probs,
    random_requests,
    rollout_config,
    same,
    save_model,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("architecture", configs())
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.3)])
def test_log_probs_are_those_of_a_full_forward_pass_on_the_cpu(
    architecture: str, dtype: str, tolerance: float, tmp_path: Path
) -> None:
    folder = save_model(configs()[architecture], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = TransformersEngine(folder, rollout_config(dtype=dtype), device="cuda")
    requests = random_requests(seed=5, count=12)
    samples = collect(engine, requests)
    assert engine.health()["device"].startswith("cuda")
    worst = 0.0
    for request in requests:
        sample = samples[request.request_id]
        expected = full_log_probs(model, request, sample)
        worst = max(worst, float(np.abs(sample.log_probs - expected).max()))
    assert worst <= tolerance


def test_updated_weights_generate_what_an_engine_loaded_with_them_does(tmp_path: Path) -> None:
    config = configs()["qwen3"]
    engine = TransformersEngine(save_model(config, tmp_path / "old"), rollout_config(), device="cuda")
    folder = save_model(config, tmp_path / "new", seed=1)
    loaded = TransformersEngine(folder, rollout_config(), device="cuda")
    engine.begin_weight_update(1)
    engine.update_weights(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))
    engine.end_weight_update()
    assert engine.weights_checksum() == loaded.weights_checksum()
    requests = random_requests(seed=4, count=8)
    updated, expected = collect(engine, requests), collect(loaded, requests)
    assert all(same(updated[key], sample) for key, sample in expected.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_reports_whether_its_samples_depend_on_their_company(
    dtype: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    engine = TransformersEngine(save_model(configs()["qwen3"], tmp_path), rollout_config(dtype=dtype), device="cuda")
    held = engine.check_batch_invariance()
    record_property(f"batch_invariant_{dtype}", held)
    print(f"batch invariance on {torch.cuda.get_device_name()} in {dtype}: {held}")
    assert engine.health()["batch_invariant"] is held
