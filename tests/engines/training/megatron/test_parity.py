"""Megatron in every layout against the same model, batch and updates in PyTorch, in one process."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engines.training.builders import make_engine, model_folder
from tests.engines.training.megatron.cases import (
    ALONE,
    CASES,
    LAYERS,
    TRAINING,
    WATCHED,
    Case,
    five_updates,
    launched,
    weights_after,
)
from tests.engines.training.megatron.table import write_table
from tests.engines.training.ranks import run_with_megatron
from tests.tiers import marks, selected

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all launches

BOUNDS = {"log-probs": 1e-5, "loss": 2e-6, "gradient norm": 1e-5, "weights": 1e-5}
"""Largest absolute difference over five updates; of the gradient's norm, relative to it."""

BFLOAT16_BOUNDS = {"log-probs": 1e-1, "loss": 3e-3, "gradient norm": 1e-2, "weights": 4e-1}
"""The same where forward and backward run in bfloat16, which has 8 bits of precision; loss and norm of the first update
alone, since which tokens are clipped in the next ones turns on the last of them. Of the weights it is their distance,
relative to how far the updates moved them: 1 if they had not moved at all."""

CLIPFRACS = {"pg_clipfrac", "tis_clipfrac", "value_clipfrac"}
"""Shares of tokens, in which the last bit of a ratio may bring one over the bound."""

LOSSES, NORMS = ("loss", "value_loss"), ("grad_norm", "critic_grad_norm")

References = dict[tuple[Any, ...], dict[str, Any]]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """The cases of the selected tests, all in one launch."""
    return selected(request, "case")


@pytest.fixture(scope="module")
def reference(work: Path, cases: list[Case]) -> References:
    """What PyTorch makes of every family, number format and kind of loss."""
    threads = torch.get_num_threads()
    made = {}
    for family in sorted({case.family for case in cases}):
        model_folder(work / "models" / family, family, layers=LAYERS)
    for case in cases:
        if (key := case.reference) not in made:
            made[key] = reference_run(case, work)
    torch.set_num_threads(threads)
    return made


def reference_run(case: Case, work: Path) -> dict[str, Any]:
    engine = make_engine(
        work / "models" / case.family,
        algorithm=case.algorithm,
        temperature=0.9,
        **TRAINING,
        **dict(case.frozen),
        dtype=case.dtype,
    )
    run = five_updates(engine, case)
    folder = work / "references" / str(CASES.index(case))
    engine.export_hf(folder)
    run["weights"] = load_file(folder / "model.safetensors")
    return run


@pytest.fixture(scope="module")
def reports(work: Path, cases: list[Case], reference: References) -> dict[str, list[dict[str, Any]]]:
    """Of every case, what each of its ranks reports."""
    run_with_megatron(launched, work / "models", work, cases)
    return {
        case.name: [json.loads((work / f"{CASES.index(case)}.{rank}.json").read_text()) for rank in range(case.ranks)]
        for case in cases
    }


def differences(case: Case, report: dict[str, Any], expected: dict[str, Any], work: Path) -> dict[str, float]:
    weights = weights_after(case, work)
    pairs = list(zip(report["metrics"], expected["metrics"], strict=True))[: 1 if case.bfloat16 else None]
    before = load_file(work / "models" / case.family / "model.safetensors")
    return {
        "log-probs": max(
            float(np.abs(np.subtract(found, right)).max())
            for found, right in zip(report["scores"], expected["scores"], strict=True)
        ),
        "loss": max(abs(found[name] - right[name]) for found, right in pairs for name in LOSSES if name in right),
        "gradient norm": max(
            abs(found[name] / right[name] - 1) for found, right in pairs for name in NORMS if name in right
        ),
        "weights": (
            apart(weights, expected["weights"]) / apart(before, expected["weights"])
            if case.bfloat16
            else max(float((weights[name] - right).abs().max()) for name, right in expected["weights"].items())
        ),
    }


def apart(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> float:
    """The distance between two models, in bfloat16."""
    pairs = ((weights[name].bfloat16().float(), right.bfloat16().float()) for name, right in others.items())
    return math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks(case.tier)) for case in CASES])
def test_five_clipped_updates_are_those_of_pytorch(
    case: Case, reports: dict[str, list[dict[str, Any]]], reference: References, work: Path
) -> None:
    expected, report = reference[case.reference], reports[case.name][0]
    norms = [metrics[name] for metrics in expected["metrics"] for name in NORMS if name in metrics]
    assert min(norms) > TRAINING["clip_grad"]
    assert set(weights_after(case, work)) == set(expected["weights"])
    found = differences(case, report, expected, work)
    bounds = BFLOAT16_BOUNDS if case.bfloat16 else BOUNDS
    assert {name: value for name, value in found.items() if value > bounds[name]} == {}
    if case.bfloat16:
        return
    before = load_file(work / "models" / case.family / "model.safetensors")
    same = {name for name, weights in weights_after(case, work).items() if weights.equal(before[name])}
    assert same == {name for name in before if case.freezes(name)}
    for metrics, right in zip(report["metrics"], expected["metrics"], strict=True):
        assert metrics.keys() == right.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(right[name], rel=1e-4, abs=5e-2 if name in CLIPFRACS else 1e-5), name


@pytest.mark.slow  # as the case it looks at is
def test_an_engine_takes_the_threads_of_its_groups_with_it(reports: dict[str, list[dict[str, Any]]]) -> None:
    of_one, with_another = reports[ALONE][0]["threads"]
    assert of_one < 70  # three for each group, of which one wakes a hundred times a second
    assert with_another < of_one + 10


def test_all_ranks_report_the_same(reports: dict[str, list[dict[str, Any]]]) -> None:
    for name, ranks in reports.items():
        assert all(report == ranks[0] for report in ranks), name


def test_digest_and_checksum_are_those_of_the_torch_engine_in_every_layout(
    reports: dict[str, list[dict[str, Any]]], reference: References, cases: list[Case]
) -> None:
    for case in cases:
        if "moe" not in case.family:  # whose experts Transformers holds in one tensor
            for value in ("checksum",) if case.bfloat16 else ("digest", "checksum"):
                assert reports[case.name][0][value] == reference[case.reference][value], case.name


@pytest.mark.proof  # as the cases it looks at are
def test_digests_of_models_with_experts_are_the_same_in_every_layout(
    reports: dict[str, list[dict[str, Any]]], cases: list[Case]
) -> None:
    of_experts = [case for case in cases if case.family == "qwen3_moe" and not case.frozen]
    assert len({reports[case.name][0]["digest"] for case in of_experts}) == 1


@pytest.mark.proof  # as the case it looks at is
def test_rank_0_holds_a_few_tensors_of_the_weights_it_exports(
    reports: dict[str, list[dict[str, Any]]], reference: References
) -> None:
    (case,) = (case for case in CASES if case.name == WATCHED)
    sizes = [tensor.nbytes for tensor in reference[case.reference]["weights"].values()]
    most_bytes = reports[WATCHED][0]["held"]
    # A bucket has at least one module's weights, and the next is gathered while one is in use.
    assert max(sizes) <= most_bytes <= 5 * max(sizes)
    assert most_bytes < sum(sizes) / 2


@pytest.mark.proof  # as the case it looks at is
def test_all_ranks_compute_the_gradients_of_a_batch_twice_and_get_the_same_bits(
    reports: dict[str, list[dict[str, Any]]],
) -> None:
    digests = [tuple(report["gradient digests"]) for report in reports[WATCHED]]
    assert len(digests) == 4
    assert len({digest for pair in digests for digest in pair}) == 1


@pytest.mark.slow
def test_the_documents_table_has_the_rows_of_the_one_that_is_written(
    reports: dict[str, list[dict[str, Any]]], reference: References, work: Path
) -> None:
    rows = [(case, differences(case, reports[case.name][0], reference[case.reference], work)) for case in CASES]
    written = write_table(rows, BOUNDS, BFLOAT16_BOUNDS).read_text().splitlines()
    page = Path("docs/engines/megatron.md").read_text().splitlines()
    first = page.index(written[0])
    assert [first_cells(row) for row in page[first : first + len(written) + 1]] == [*map(first_cells, written), []]


def first_cells(row: str) -> list[str]:
    """All but the figures that were measured."""
    cells = row.split("|")
    return cells[1:] if "bound" in row or "cannot run" in row else cells[1:4]
