"""Checkpoints that Megatron-LM and slime wrote become model folders, and no pickle in them is opened."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.engines.models.folders import open_weights
from tests.architectures import architecture
from tests.engines.training.megatron.torch_dist_cases import FORGERIES, WRITTEN, Written, launched
from tests.engines.training.ranks import run_with_megatron
from tests.flows.cli.test_convert import cairn

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torch-dist")
    for name in {written.architecture for written in WRITTEN} | {"qwen2"}:
        architecture(name).save(folder / name)
    run_with_megatron(launched, folder)
    return folder


@pytest.fixture(scope="module")
def report(work: Path) -> dict[str, Any]:
    return json.loads((work / "report.json").read_text())


@pytest.mark.parametrize("written", WRITTEN, ids=lambda written: written.name)
def test_a_checkpoint_in_another_layout_becomes_the_model_byte_for_byte(work: Path, written: Written) -> None:
    before, after = open_weights(work / written.architecture), open_weights(work / f"{written.name} converted")
    assert after.keys() == before.keys()
    assert all(torch.equal(weight[...], before[name][...]) for name, weight in after.items())


@pytest.mark.slow
def test_the_command_takes_the_newest_checkpoint_of_a_folder(work: Path) -> None:
    first = WRITTEN[0]
    done = cairn("convert", work / first.name, work / "by command", "--model", work / first.architecture)
    assert (done.returncode, done.stdout) == (0, f"{work / 'by command'}: a model folder of {work / first.name}\n")
    before, after = open_weights(work / first.architecture), open_weights(work / "by command")
    assert all(torch.equal(after[name][...], weight[...]) for name, weight in before.items())


def test_a_checkpoint_of_another_model_is_refused(report: dict[str, Any]) -> None:
    assert "it is of another model" in report["of another model"]


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda forgery: forgery.__name__)
def test_no_pickle_of_a_forged_checkpoint_runs(report: dict[str, Any], forgery: Any) -> None:
    found = report["forged"][forgery.__name__]
    assert not found["ran"]
    unread = forgery.__name__ in ("in_the_common_part", "in_a_plan_of_the_metadata")  # as good as any other
    assert found["outcome"] == "done" if unread else found["outcome"].startswith(("Damaged", "BadModel"))
