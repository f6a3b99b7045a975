"""The recipes are right as they stand, for the models and data that their examples build."""

import math
import random
from itertools import islice
from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from examples.building import begin, write_rows
from examples.calculator import build as calculator
from examples.counting import build as counting
from examples.dots import build as dots
from examples.longer_lists import build as longer_lists
from examples.quarter_turns import build as quarter_turns
from examples.search import build as search
from examples.solver_selector import build as solver_selector
from examples.verifiers import build as verifiers
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["rollout.num_rollout=4", "rollout.rollout_batch_size=32", "tracking.tensorboard_dir=null"]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def test_every_recipe_fits_what_its_example_builds(root, monkeypatch):
    monkeypatch.chdir(root)
    if not Path("examples").exists():
        Path("examples").symlink_to(ROOT / "examples")
    write_examples()
    recipes = sorted((ROOT / "configs/recipes").glob("*.yaml"))
    assert {recipe.stem for recipe in recipes} >= {*STAND_IN, *NEEDING}
    found = {}
    for recipe in recipes:
        config = load(recipe, STAND_IN.get(recipe.stem, []))
        problems = setup_problems(config) + data_problems(config)
        found[recipe.stem] = [one for one in problems if not any(lack in one for lack in NEEDING.get(recipe.stem, ()))]
    assert {name: problems for name, problems in found.items() if problems} == {}


STAND_IN = {
    name: [f"model.path=build/{folder}/untrained"]
    for name, folder in {
        "calculator": "calculator",
        "counting": "counting",
        "dots": "dots",
        "longer-lists": "longer_lists",
        "reasoning-gym-tiny": "quarter_turns",
        "reasoning-gym-turns": "quarter_turns",
        "search": "search",
        "solver-selector": "solver_selector",
        "verifiers": "verifiers",
    }.items()
}
"""Models before the warm start, in place of those after it."""
NEEDING = {"gsm8k-tiny": ("gsm8k/train.jsonl",)}
"""Data that is downloaded; `test_the_recipe_of_gsm8k_fits_the_real_data` has it."""


def write_examples() -> None:
    """A few rows of the data of every example but the quickstart, and its model before the warm start."""
    draw = random.Random(0)
    for example in (calculator, search, verifiers):
        example.prepare(example.FOLDER, 0, 64)
    for example in (quarter_turns, solver_selector):
        begin(example.FOLDER, example.shown(0, 64), seed=0)
    for example in (counting, longer_lists):
        begin(example.FOLDER, [*islice(example.demonstrations(draw), 64)], seed=0)
    dots.begin(dots.FOLDER, seed=0, shown=8, train=60, held_out=20)
    write_rows(counting.FOLDER / "train.jsonl", islice(counting.problems(0, held_out=False), 8))
    write_rows(counting.FOLDER / "heldout.jsonl", islice(counting.problems(0, held_out=True), 8))
    write_rows(longer_lists.FOLDER / "train.jsonl", islice(longer_lists.curriculum(draw), 8))
    write_rows(longer_lists.FOLDER / "heldout.jsonl", [longer_lists.problem(draw, 8, held_out=True)])


def test_the_quickstarts_recipe_draws_one_batch_a_step(root, monkeypatch):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/quickstart.yaml")
    assert (config.samples_per_rollout, config.global_batch_size) == (256, 256)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs {GSM8K}, the GSM8K training set")
def test_the_recipe_of_gsm8k_fits_the_real_data(root, monkeypatch):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/gsm8k-tiny.yaml", [f"data.path={GSM8K}"])
    assert setup_problems(config) + data_problems(config) == []


@pytest.mark.proof
def test_the_recipe_for_demonstrations_lowers_their_loss(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/sft.yaml", SHORT)
    assert setup_problems(config) + data_problems(config) == []
    first, *_, last = losses(config, tmp_path)
    assert last < first


@pytest.mark.proof
def test_the_recipe_for_preferences_tells_them_apart(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/dpo.yaml", [*SHORT, "eval.eval_interval=null", "reward.rm_type=math"])
    assert setup_problems(config) + data_problems(config) == []
    first, *_, last = losses(config, tmp_path)
    assert first == pytest.approx(math.log(2), abs=1e-6)
    assert last < first


def losses(config: RunConfig, store: Path) -> list[float]:
    """Of every iteration of a run."""
    with tiny_context(str(store), config) as (run, _):
        for index in range(config.rollout.num_rollout):
            iteration(run, DirectSteps(run), index)
        return [run.committed(i, Step.TRAIN).metrics["loss"] for i in range(config.rollout.num_rollout)]
