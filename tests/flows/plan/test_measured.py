"""What is planned for a rank against the bytes of real ones, Megatron's and torch's, on small models."""

import json
from pathlib import Path

import pytest

from cairn.flows.plan.memory import rank_memory
from cairn.flows.plan.subject import subject_of
from tests.engines.training.ranks import run_with_megatron
from tests.flows.plan.measured import CASES, Case, launched
from tests.tiers import marks, selected

pytestmark = pytest.mark.timeout(600)  # the first test waits for all launches

Reports = dict[str, list[dict[str, int]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of every case that is run this time, what its ranks measured."""
    work = tmp_path_factory.mktemp("ranks")
    cases = selected(request, "case")
    for case in cases:
        if not (models / case.architecture).exists():
            case.model().save(models / case.architecture)
    run_with_megatron(launched, cases, models, work)
    return {
        case.name: [
            json.loads((work / f"{case.name.replace(' ', '-')}.{rank}.json").read_text()) for rank in range(case.ranks)
        ]
        for case in cases
    }


@pytest.mark.parametrize("case", [pytest.param(case, marks=marks(case.tier), id=case.name) for case in CASES])
def test_a_rank_holds_what_is_planned(case: Case, reports: Reports, models: Path) -> None:
    subject = subject_of(case.config(models), case.name, "h100", memory_of_this_machine=64e9)
    stages = subject.config.training.pipeline_model_parallel_size
    for rank, measured in enumerate(reports[case.name]):
        planned = rank_memory(subject, rank * stages // case.ranks)
        state = {row.what: row.bytes for row in planned.state}
        assert state["weights"] == pytest.approx(measured["weights"], rel=0.01)
        assert state["gradients"] == pytest.approx(measured["gradients"], rel=0.01)
        assert state["optimizer"] == pytest.approx(measured["optimizer"], rel=0.01)
        # Torch's gradients are made in the step, Megatron's are there before.
        step = sum(row.bytes for row in planned.step) + state["gradients"] * (case.engine == "torch")
        assert step == pytest.approx(measured["step"], rel=case.bound)
