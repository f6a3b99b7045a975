"""The recipe that plays an environment of verifiers, as it stands but for its size."""

from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from examples.verifiers.build import prepare
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/recipes/verifiers.yaml"
SMALL = ["rollout.num_rollout=1", "rollout.rollout_batch_size=1", "rollout.n_samples_per_prompt=2"]


@pytest.mark.slow
def test_the_recipe_plays_episodes_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    prepare(tmp_path / "build/verifiers", seed=0, shown=64)
    config = load(RECIPE, [*SMALL, "model.path=build/verifiers/untrained"])
    assert setup_problems(config) + data_problems(config) == []
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        metrics = run.committed(0, Step.ADVANTAGE).metrics
    assert metrics["raw_reward"] == 0.0  # of a model that says no number
