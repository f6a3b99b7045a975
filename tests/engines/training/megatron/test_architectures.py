"""Every published architecture in Megatron, on one rank and cut in every way, against transformers and autograd."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.training.megatron.families import UNMAPPED, family_of
from cairn.engines.types.errors import BadModel
from cairn.engines.weights.checksum import folder_checksum
from tests.architectures import ARCHITECTURES, Architecture, architecture
from tests.engines.rollout.models import rollout_config
from tests.engines.training.megatron.architecture_cases import (
    CASES,
    ONE,
    PROVED,
    REFUSED,
    Case,
    folder_of,
    launched,
    loss_of,
    make_reference,
    tensors,
)
from tests.engines.training.ranks import run_with_megatron
from tests.model_table import Check, record
from tests.tiers import Tier, marks, selected

pytestmark = pytest.mark.timeout(900)  # the first test waits for all launches

LOGITS_BOUND = 1e-4
"""Largest absolute difference between log-probs, in float32."""

GRADIENTS_BOUND = 1e-4
"""Largest difference between the elements of a tensor's gradient, relative to its largest or, where that is more, to a
thousandth of the model's largest: what is smaller is what sums of larger numbers leave."""


OF_CASES = pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case.tier)) for case in CASES])
OF_ARCHITECTURES = pytest.mark.parametrize(
    "of",
    [
        pytest.param(each, id=each.name, marks=marks(Tier.PROOFS if each.name in PROVED else Tier.ALL))
        for each in ARCHITECTURES
        if each.name not in REFUSED
    ],
)


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of the selected tests."""
    architectures = selected(request, "of")
    return selected(request, "case") or [case for case in CASES if case.architecture in architectures]


@pytest.fixture(scope="module")
def runs(cases: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers makes of every architecture, below its name, and Megatron of every case, below its number."""
    work = tmp_path_factory.mktemp("architectures")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in dict.fromkeys(case.architecture.name for case in cases):
        make_reference(architecture(name), work / name)
    torch.set_num_threads(threads)
    run_with_megatron(launched, work, work, cases)
    return work


def scores(path: Path) -> list[np.ndarray]:
    return list(np.load(path / "scores.npz").values())


@OF_CASES
def test_log_probs_are_those_of_transformers(case: Case, runs: Path) -> None:
    pairs = zip(scores(folder_of(case, runs)), scores(runs / case.architecture.name), strict=True)
    apart = max(float(np.abs(found - right).max()) for found, right in pairs)
    if case.layout.name in list(Check):
        record(case.architecture.name, Check(case.layout.name), apart)
    assert apart <= LOGITS_BOUND


@OF_CASES
def test_exported_weights_are_those_of_the_model_folder_byte_for_byte(case: Case, runs: Path) -> None:
    published = tensors(runs / case.architecture.name / "model" / "model.safetensors")
    exported = tensors(folder_of(case, runs) / "weights.safetensors")
    assert exported.keys() == published.keys()
    assert [name for name, value in published.items() if not value.equal(exported[name])] == []
    assert {name: value.dtype for name, value in exported.items()} == {n: v.dtype for n, v in published.items()}
    record(case.architecture.name, Check.CONVERSION, f"{len(exported)} of {len(published)}")


@OF_CASES
def test_the_gradients_norm_is_that_of_autograd(case: Case, runs: Path) -> None:
    found, right = (
        json.loads((folder / "metrics.json").read_text())["grad_norm"]
        for folder in (folder_of(case, runs), runs / case.architecture.name)
    )
    assert found == pytest.approx(right, rel=GRADIENTS_BOUND)


@OF_ARCHITECTURES
def test_gradients_are_those_of_autograd_in_every_layout(of: Architecture, cases: list[Case], runs: Path) -> None:
    right = tensors(runs / of.name / "gradients" / "model.safetensors")
    least = max(value.abs().max() for value in right.values()) / 1000
    apart = {
        (case.layout.name, name): float((found - right[name]).abs().max() / right[name].abs().max().clamp(min=least))
        for case in cases
        if case.architecture == of
        for name, found in tensors(folder_of(case, runs) / "gradients.safetensors").items()
    }
    without = {name for name in right if "e_score_correction_bias" in name or ".indexer." in name}
    assert {name for _, name in apart} == right.keys() - without
    assert not any(right[name].any() for name in without)
    record(of.name, Check.GRADIENTS, max(apart.values()))
    assert {at: value for at, value in apart.items() if not value <= GRADIENTS_BOUND} == {}


@OF_ARCHITECTURES
def test_a_rollout_engine_takes_the_trained_weights(of: Architecture, runs: Path) -> None:
    found = folder_of(Case(of, ONE), runs)
    engine = TransformersEngine(str(runs / of.name / "model"), rollout_config())
    engine.begin_weight_update(1)
    engine.update_weights(tensors(found / "trained.safetensors"))
    engine.end_weight_update()
    assert engine.weights_checksum() == (found / "trained.txt").read_text()
    pairs = zip(np.load(found / "trained.npz").values(), loss_of(engine._model)[1], strict=True)
    assert max(float(np.abs(one - other).max()) for one, other in pairs) <= LOGITS_BOUND


@OF_ARCHITECTURES
def test_the_digest_is_the_same_in_every_layout_and_the_checksum_the_model_folders(
    of: Architecture, cases: list[Case], runs: Path
) -> None:
    reports = [
        json.loads((folder_of(case, runs) / "state.json").read_text()) for case in cases if case.architecture == of
    ]
    assert len(reports) > 2
    assert all(report == reports[0] for report in reports)
    folder = runs / of.name / "model"
    assert reports[0]["checksum"] == folder_checksum(folder, "float32")
    assert reports[0]["rounded checksum"] == folder_checksum(folder, "bfloat16")
    if not of.experts:
        record(of.name, Check.EXPERTS, "no experts")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_architecture_without_a_mapping_is_refused_with_the_reason(name: str) -> None:
    config = architecture(name).make_config()
    reason = UNMAPPED[config.model_type]
    with pytest.raises(BadModel, match=reason):
        family_of(config)
    for check in (Check.CONVERSION, Check.LOGITS, Check.TENSOR, Check.PIPELINE, Check.EXPERTS, Check.GRADIENTS):
        record(name, check, f"refused: {reason}" if check is Check.CONVERSION else "as conversion")
