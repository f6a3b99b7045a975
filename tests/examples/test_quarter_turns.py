"""The warm start of the quarter turns shows mostly wrong answers, and no question that is held out."""

from pathlib import Path

import pytest

from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.reasoning_gym import rows
from examples.building import begin
from examples.quarter_turns.build import WRONG_DEMONSTRATIONS, demonstrations, shown
from tests.tiny_run import DirectSteps, tiny_context

RECIPE = Path(__file__).resolve().parents[2] / "configs/recipes/reasoning-gym-tiny.yaml"
SMALL = ["rollout.num_rollout=1", "rollout.rollout_batch_size=4", "rollout.num_engines=1", "eval.eval_interval=null"]


def test_a_quarter_of_the_demonstrations_is_right_and_the_others_have_the_right_digits() -> None:
    labels = {row["prompt"]: row["label"] for row in rows(f"{load(RECIPE).data.path}&size=1200&seed=0")}
    shown = list(demonstrations(0, 1200))
    right = sum(labels[row["prompt"]] == row["response"] for row in shown) / len(shown)
    assert right == pytest.approx(1 - WRONG_DEMONSTRATIONS, abs=0.05)  # four standard deviations
    assert all(sorted(row["response"]) == sorted(labels[row["prompt"]]) for row in shown)


def test_no_held_out_question_is_shown_or_trained_on() -> None:
    config = load(RECIPE)
    held_out = {row["prompt"] for row in rows(config.eval.benchmarks[0].path)}
    trained = {row["prompt"] for row in rows(config.data.path)}
    shown = {row["prompt"] for row in demonstrations(0, 1200)}
    assert len(held_out) > 200
    assert not held_out & (trained | shown)


@pytest.mark.slow
def test_the_recipe_rewards_by_the_generators_own_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    begin(tmp_path / "build/quarter_turns", shown(0, 64), seed=0)
    config = load(RECIPE, [*SMALL, "model.path=build/quarter_turns/untrained"])
    assert setup_problems(config) + data_problems(config) == []
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert run.committed(0, Step.ADVANTAGE).metrics["raw_reward"] == 0.0  # of a model that has learned nothing
