"""The recipes are right as they stand, for the model and data that the quickstart builds."""

from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems

ROOT = Path(__file__).resolve().parents[2]
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
