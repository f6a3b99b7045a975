"""Every loss and correction in Megatron, packed and over two ranks of each kind, against the same updates in PyTorch,
padded and in one process, in micro-batches of another size."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engines.training.algorithms import ALGORITHMS
from tests.engines.training.builders import make_engine, model_folder, weights_of
from tests.engines.training.megatron.cases import TRAINING
from tests.engines.training.megatron.loss_cases import LAYOUTS, launched, teachers_rows, two_updates
from tests.engines.training.ranks import run_with_megatron

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]  # the first test waits for all launches


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("losses")


@pytest.fixture(scope="module")
def reference(work: Path) -> dict[str, Any]:
    folder = model_folder(work / "model")
    threads, made = torch.get_num_threads(), {}
    for name, algorithm in ALGORITHMS.items():
        options = {**TRAINING, "max_tokens_per_gpu": 70}
        engine = make_engine(folder, algorithm=algorithm, temperature=0.9, teacher=folder, **options)
        if algorithm.learns_from_top_k:
            made["teacher's rows"] = teachers_rows(engine)
        made[name] = two_updates(engine), weights_of(engine)
    torch.set_num_threads(threads)
    return made


@pytest.fixture(scope="module")
def reports(work: Path, reference: dict[str, Any]) -> dict[str, Any]:
    run_with_megatron(launched, work / "model", work)
    found = {
        layout: [json.loads((work / f"{layout}.{rank}.json").read_text()) for rank in (0, 1)] for layout in LAYOUTS
    }
    assert all(first == second for first, second in found.values())
    return {layout: first for layout, (first, _) in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_teachers_most_probable_tokens_are_those_of_pytorch(
    layout: str, reports: dict[str, Any], reference: dict[str, Any]
) -> None:
    for found, rows in zip(reports[layout]["teacher's rows"], reference["teacher's rows"], strict=True):
        np.testing.assert_allclose(found, rows, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_those_of_pytorch(
    name: str, layout: str, reports: dict[str, Any], reference: dict[str, Any], work: Path
) -> None:
    metrics, weights = reference[name]
    for share in ("tis_clipfrac", "opsm_clipfrac", "pg_clipfrac"):
        assert 0 < metrics[share] < 1, "something is clipped and masked, and not everything"
    assert metrics["grad_norm"] > TRAINING["clip_grad"]
    assert reports[layout][name] == pytest.approx(metrics, rel=1e-4, abs=1e-5)
    found = load_file(work / f"{layout}, {name}.safetensors")
    for tensor, right in weights.items():
        torch.testing.assert_close(found[tensor], right, rtol=0, atol=1e-5)
