"""The recipes of published models are right as they stand, by the models' published config.json: without weights, and
without the machines that they are for."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cairn.configs.catalogue import published_config
from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.engines.rollout.plan import kind_of
from cairn.engines.rollout.sglang.installation import Installation
from cairn.flows.driver.validation import data_problems, setup_problems
from examples.quickstart.model import build_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "configs/recipes/models").glob("*.yaml"))
HARDWARE = re.compile(r" on (?:(\d+) machines of )?8 × (\w+) \d+ GB")
OF_THE_MACHINE = ("Transformer Engine", "flash-linear-attention")
"""Packages that training on GPUs needs and that tests do not have."""


@pytest.fixture(scope="module")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What recipes name: every model's config.json, with no weights and some tokenizer, and a row of the data."""
    folder = tmp_path_factory.mktemp("downloads")
    question = "Solve the problem. The last line should be of the form Answer: \\boxed{$Answer}."
    tokenizer = build_tokenizer([question])
    for recipe in RECIPES:
        model = folder / load(recipe).model.path
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(published_config(model.name)))
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {}}))
        tokenizer.save_pretrained(model)
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    row = json.dumps({"prompt": [{"role": "user", "content": question}], "label": "34"})
    for file in ("dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"):
        path = folder / "datasets" / file
        path.parent.mkdir(parents=True)
        path.write_text(row + "\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def one_installation() -> Iterator[None]:
    """SGLang is asked for its options once."""
    found = Installation.find()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Installation, "find", lambda: found)
        yield


def test_recipes_of_published_models_are_valid_for_their_configs(
    downloads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(downloads)
    assert len(RECIPES) >= 38
    found = {}
    for recipe in RECIPES:
        config = load(recipe)
        found[recipe.stem] = without_those_of_the_machine(setup_problems(config)) + data_problems(config)
        if config.model.path != f"models/{recipe.stem.removesuffix('-offload')}":
            found[recipe.stem].append(f"its model is {config.model.path}")
    assert {name: problems for name, problems in found.items() if problems} == {}


def test_recipes_take_all_of_the_machines_that_they_are_for() -> None:
    wrong = {}
    for recipe in RECIPES:
        config, (machines, gpu) = load(recipe), hardware_of(recipe)
        gpus, ray = gpus_of(config), config.fleet.ray_address
        if gpus != 8 * machines or (ray == "auto") != (machines > 1) or config.fleet.gpu != gpu:
            wrong[recipe.stem] = f"{gpus} {config.fleet.gpu} and fleet.ray_address={ray} for {machines} machines"
    assert wrong == {}


def hardware_of(recipe: Path) -> tuple[int, str]:
    """Machines and their GPUs, as the head says."""
    stated = HARDWARE.search(recipe.read_text().partition("\n\n")[0].replace("\n#", ""))
    assert stated is not None, f"the head of {recipe.name} names no hardware"
    return int(stated[1] or 1), stated[2].lower()


def gpus_of(config: RunConfig) -> int:
    plan = kind_of(config.rollout.engine).plan(config.rollout, config.fleet.offloads_rollout)
    served = int(sum(engine.nnodes * engine.num_gpus for engine in plan.engines))
    if config.fleet.colocate:
        assert served == config.training.world_size, config.model.path
        return served
    return served + config.training.world_size


def without_those_of_the_machine(problems: Sequence[str]) -> list[str]:
    return [problem for problem in problems if not any(package in problem for package in OF_THE_MACHINE)]
