"""Every recipe is planned, and fits the machines that its first line names."""

import re
from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.flows.plan.planning import plan_of
from cairn.flows.plan.rollout import weight_bytes
from cairn.flows.plan.subject import subject_of
from tests.architectures import architecture

RECIPES = Path(__file__).parents[3] / "configs" / "recipes"
STATED = re.compile(r"(?:(\d+) machines of )?(\d+) × (H\d+)")


@pytest.mark.parametrize("recipe", sorted((RECIPES / "models").glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_of_a_published_model_fits_the_machines_that_it_names(recipe: Path) -> None:
    stated = STATED.search(recipe.read_text("utf-8").splitlines()[0])
    assert stated is not None
    plan = plan_of(subject_of(load(recipe), recipe.stem, stated[3], memory_of_this_machine=64e9))
    assert plan.fits, (plan.problems, [memory.of for memory in plan.memory if not memory.fits])
    assert plan.machines == int(stated[1] or 1)
    assert plan.gpus == int(stated[1] or 1) * int(stated[2])


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_recipe_without_gpus_fits_a_small_machine(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folders = load(recipe).model.folders.values()
    for folder in {Path(folder) for folder in folders}:
        architecture("qwen3").save(tmp_path / folder)
    plan = plan_of(subject_of(load(recipe), recipe.stem, "h100", memory_of_this_machine=16e9))
    assert plan.fits
    assert plan.gpus == 0


def test_a_folder_in_fp8_is_served_in_a_byte_a_weight_but_for_what_stays_wide() -> None:
    recipe = RECIPES / "models" / "DeepSeek-R1.yaml"
    subject = subject_of(load(recipe), recipe.stem, "h200", memory_of_this_machine=64e9)
    wide = 2 * 129280 * 7168 + 58 * 256 * 7168  # embedding and output layer, routers
    assert weight_bytes(subject) * subject.model.parameters == pytest.approx(671.026e9 + wide, rel=1e-4)
