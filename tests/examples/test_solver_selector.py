"""The example of two roles: who is asked what, who is paid for what, and one iteration of its recipe."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from cairn import Sample, SampleRequest, Segment
from cairn.configs.loader import load
from cairn.flows.driver.validation import data_problems, setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.data.reasoning_gym import rows
from cairn.tasks.rewards.reasoning_gym import grade
from examples.building import begin
from examples.quarter_turns.build import QUESTIONS
from examples.quickstart.model import build_tokenizer
from examples.solver_selector.agents import SOLVERS, choice, generate
from examples.solver_selector.build import shown
from tests.tiny_run import DirectSteps, tiny_context

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs/recipes/solver-selector.yaml"
SMALL = ["rollout.num_rollout=2", "rollout.rollout_batch_size=2", "rollout.n_samples_per_prompt=2"]
ROW = next(iter(rows(f"{QUESTIONS}&size=5&seed=1")))
OTHER = "0 0\n0 0"


class Scripted:
    """A policy that says what it was told to, and a judge that counts."""

    def __init__(self, *says: str) -> None:
        self.tokenizer = build_tokenizer([ROW["prompt"], ROW["label"]])
        self.says, self.asked, self.judged = says, list[str](), 0

    async def sample(self, ids: list[int], *, max_new_tokens: int | None = None) -> Segment:
        self.asked.append(self.tokenizer.decode(ids))
        said = self.tokenizer.encode(f"{self.says[len(self.asked) - 1]}<|im_end|>", add_special_tokens=False)
        return Segment(np.array(said, np.int32), np.ones(len(said), np.uint8), str(len(self.asked) - 1))

    async def judge(self, grader: str, response: str) -> float:
        assert grader == "reasoning_gym"
        self.judged += 1
        return float(grade(Sample(response, ROW["label"], ROW["metadata"]))["reward"])


@pytest.mark.parametrize(("pick", "paid"), [("2", 1.0), ("1", 0.0), ("4", 0.0), ("x", 0.0)])
def test_solvers_are_paid_for_their_answers_and_the_selector_for_its_pick(pick: str, paid: float) -> None:
    policy = Scripted(OTHER, ROW["label"], OTHER, pick)
    prompt = f"<|im_start|>user\n{ROW['prompt']}<|im_end|>\n<|im_start|>assistant\n"
    request = SampleRequest(0, 0, policy.tokenizer.encode(prompt), 0, prompt=prompt, label=ROW["label"])
    found = asyncio.run(generate(policy, request))  # type: ignore[arg-type]
    assert [(one.role, one.reward) for one in found] == [
        ("solver", 0.0), ("solver", 1.0), ("solver", 0.0), ("selector", paid),
    ]  # fmt: skip
    assert policy.asked[:SOLVERS] == [prompt] * SOLVERS
    assert choice(ROW["prompt"], [OTHER, ROW["label"], OTHER]) in policy.asked[SOLVERS]
    assert policy.tokenizer.decode(found[-1].prompt_ids) == policy.asked[SOLVERS]
    assert policy.judged == SOLVERS


def test_the_warm_start_picks_at_random_among_answers() -> None:
    picks = [row["response"] for row in shown(0, 1200)[1::2]]
    assert min(picks.count(str(number)) for number in range(1, SOLVERS + 1)) > len(picks) / SOLVERS * 0.75


@pytest.mark.slow
def test_the_recipe_trains_both_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    begin(tmp_path / "build/solver_selector", shown(0, 64), seed=0)
    own = ["model.path=build/solver_selector/untrained", "eval.eval_interval=null"]
    config = load(RECIPE, [*SMALL, *own, "rollout.rollout_max_response_len=4"])
    assert setup_problems(config) + data_problems(config) == []
    with tiny_context(str(tmp_path), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
            metrics = run.committed(index, Step.ADVANTAGE).metrics
            assert {metrics["role/solver/reward"], metrics["role/selector/reward"]} == {0.0}  # it has learned nothing
            assert metrics["turns/mean"] == SOLVERS + 1
        assert run.committed(1, Step.TRAIN).weight_version_out == 2
