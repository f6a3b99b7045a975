"""A run whose rewards a reward model gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.reward import RewardConfig, RewardModelConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.scoring.reward_model import PromptAndResponse, RewardModel
from cairn.flows.driver.validation import setup_problems
from cairn.flows.history.rescore import rescore
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.grading.graders import get_grader
from tests.reward_models import write_reward_model
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.fixture(scope="module")
def folder(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tmp_path_factory.mktemp("reward") / "model", tiny_assets / "model")


def scored(assets: Path, folder: Path, **options: Any) -> RunConfig:
    rollout = {"num_rollout": 1, "rollout_batch_size": 2, "n_samples_per_prompt": 2, "rollout_max_response_len": 6}
    reward = {"custom_rm_path": None, "rm_type": "reward_model", "reward_model": {"path": str(folder), **options}}
    return tiny_config(assets, rollout=rollout, reward=reward)


def test_an_iteration_is_trained_on_its_scores_and_rescored_by_it(
    tiny_assets: Path, folder: Path, tmp_path: Path
) -> None:
    config = scored(tiny_assets, folder)
    assert setup_problems(config) == []
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rewards = run.read(next(c for c in run.ledger.commits(0) if c.step is Step.REWARD)).to_pylist()
        rollout = run.read(next(c for c in run.ledger.commits(0) if c.step is Step.ROLLOUT)).to_pylist()
        ledger = run.ledger
        figures, _ = rescore(ledger)
    engine = RewardModel(RewardModelConfig(path=str(folder)))
    rows = [json.loads(line)["prompt"] for line in (tiny_assets / "train.jsonl").read_text().splitlines()]
    for sample, graded in zip(rollout, rewards, strict=True):
        prompt = rows[sample["prompt_index"]]
        messages = ({"role": "user", "content": prompt},)
        (score,) = engine.score([PromptAndResponse(messages, prompt, sample["response_text"])])
        assert graded["reward"] == score.value
        assert graded["grader"] == "reward_model"
        assert json.loads(graded["components"]) == {"tokens": score.tokens}
    assert len({graded["reward"] for graded in rewards}) > 1
    assert figures.overall.changed == 0


def test_another_folder_is_another_version(folder: Path, tmp_path: Path) -> None:
    def version(of: Path, **options: Any) -> str:
        return get_grader(RewardConfig(rm_type="reward_model", reward_model={"path": str(of), **options})).version

    other = write_reward_model(tmp_path / "other", folder, seed=1)
    assert version(folder) != version(other)
    assert version(folder) != version(folder, max_length=64)
    assert version(folder) == version(write_reward_model(tmp_path / "same", folder))


def test_validation_names_what_is_missing_and_what_has_no_effect(tiny_assets: Path, folder: Path) -> None:
    (problem,) = setup_problems(scored(tiny_assets, folder / "none"))
    assert problem.startswith(f"reward: reward_model.path: Model folder {folder / 'none'} does not exist")
    (problem,) = setup_problems(tiny_config(tiny_assets, reward={"custom_rm_path": None, "rm_type": "reward_model"}))
    assert problem == ("reward: the grader 'reward_model' needs a model: set reward.reward_model.path to its folder")
    unread = {"rm_type": "exact_match", "custom_rm_path": None, "reward_model": {"path": str(folder)}}
    notes: list[str] = []
    assert setup_problems(tiny_config(tiny_assets, reward=unread), notes.append) == []
    assert notes == [
        "reward.reward_model has no effect, since only the grader reward_model reads it; set "
        "reward.rm_type=reward_model, or leave it out"
    ]
