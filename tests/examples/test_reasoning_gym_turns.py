"""The example of several turns: what an episode consists of, what it is worth, and one iteration of its recipe."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn import ResponseSegment, Sample, SampleRequest, Segment
from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.reasoning_gym import rows
from cairn.tasks.rewards.reasoning_gym import grade
from examples.building import begin
from examples.quarter_turns.build import QUESTIONS, shown
from examples.quickstart.model import build_tokenizer
from examples.reasoning_gym.turns import TURNS, WRONG, generate, reward
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/recipes/reasoning-gym-turns.yaml"
SMALL = ["rollout.num_rollout=1", "rollout.rollout_batch_size=4", "rollout.num_engines=1", "eval.eval_interval=null"]
ROW = next(iter(rows(f"{QUESTIONS}&size=5&seed=1")))
OTHER = "0 0\n0 0"


@dataclass
class Scripted:
    """A policy that says what it was told to."""

    says: list[str]
    tokenizer: Any = field(default_factory=lambda: build_tokenizer([ROW["prompt"], ROW["label"], WRONG]))
    asked: list[list[int]] = field(default_factory=list)

    async def sample(self, ids: list[int]) -> Segment:
        self.asked.append(list(ids))
        text = self.says[len(self.asked) - 1]
        answer = np.array(self.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False), np.int32)
        return Segment(answer, np.ones(len(answer), np.uint8), str(len(self.asked) - 1), finish_reason="stop")

    async def judge(self, grader: str, response: str) -> float:
        assert grader == "reasoning_gym"
        return float(grade(Sample(response, ROW["label"], ROW["metadata"]))["reward"])


def played(*says: str) -> tuple[Scripted, list[Segment]]:
    policy = Scripted(list(says))
    prompt = policy.tokenizer.encode(ROW["prompt"], add_special_tokens=False)
    request = SampleRequest(0, 0, prompt, 0, label=ROW["label"], metadata=ROW["metadata"])
    return policy, list(asyncio.run(generate(policy, request)).segments)


def test_an_episode_ends_with_the_first_right_answer() -> None:
    policy, segments = played(OTHER, ROW["label"], OTHER)
    assert len(policy.asked) == 2
    assert policy.tokenizer.decode(segments[1].ids) == (
        f"\n<|im_start|>user\n{WRONG}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert policy.asked[1] == [*policy.asked[0], *segments[0].ids, *segments[1].ids]
    assert segments[1].loss_mask.sum() == 0


def test_an_episode_ends_after_the_last_turn_with_an_answer() -> None:
    policy, segments = played(*[OTHER] * (TURNS + 1))
    assert len(policy.asked) == TURNS
    assert [segment.call is None for segment in segments] == [False, True] * (TURNS - 1) + [False]


@pytest.mark.parametrize(
    ("answers", "worth"),
    [([ROW["label"]], 1.0), ([OTHER, ROW["label"]], 0.5), ([OTHER, OTHER, ROW["label"]], 0.25), ([OTHER] * 3, 0.0)],
)
def test_a_right_answer_is_worth_half_of_what_it_was_a_turn_earlier(answers: list[str], worth: float) -> None:
    said = [ResponseSegment((1,), f"{answer}<|im_end|>", sampled=True) for answer in answers]
    told = ResponseSegment((2,), f"\n<|im_start|>user\n{WRONG}<|im_end|>\n<|im_start|>assistant\n", sampled=False)
    segments = [one for answer in said for one in (answer, told)][:-1]
    sample = Sample(response="all of them", label=ROW["label"], metadata=ROW["metadata"], segments=tuple(segments))
    found = reward(sample)
    assert found["reward"] == worth
    assert found["answers"] == len(answers)


@pytest.mark.slow
def test_the_recipe_plays_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    begin(tmp_path / "build/quarter_turns", shown(0, 64), seed=0)
    own = ["model.path=build/quarter_turns/untrained", f"data.path={QUESTIONS}&size=40&seed=1000000"]
    config = load(RECIPE, [*SMALL, *own, "rollout.rollout_max_response_len=4"])
    assert setup_problems(config) + data_problems(config) == []
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        assert run.committed(0, Step.ADVANTAGE).metrics["raw_reward"] == 0.0  # of a model that has learned nothing
