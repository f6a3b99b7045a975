"""The recipes are right as they stand, for the model and data that the quickstart builds."""

import math
from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.commits import Step
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["rollout.num_rollout=4", "rollout.rollout_batch_size=32", "tracking.tensorboard_dir=null"]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


def test_the_quickstarts_recipe_fits_what_is_built(root, monkeypatch):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/quickstart.yaml")
    assert setup_problems(config) + data_problems(config) == []
    assert (config.samples_per_rollout, config.global_batch_size) == (256, 256)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"needs {GSM8K}, the GSM8K training set")
def test_the_recipe_of_gsm8k_fits_the_real_data(root, monkeypatch):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/gsm8k-tiny.yaml", [f"data.path={GSM8K}"])
    assert setup_problems(config) + data_problems(config) == []


def test_the_recipe_for_demonstrations_lowers_their_loss(root, monkeypatch, tmp_path):
    monkeypatch.chdir(root)
    config = load(ROOT / "configs/recipes/sft.yaml", SHORT)
    assert setup_problems(config) + data_problems(config) == []
    first, *_, last = losses(config, tmp_path)
    assert last < first


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
