"""Functions written for slime, in a run and where they ask for what there is not."""

from pathlib import Path
from typing import Any

import pytest

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.slime import Arguments
from cairn.flows.driver.validation import setup_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.grading.graded import GradedSample
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards.sample import Sample
from cairn.tasks.selecting.filters import get_filter, takes_samples
from cairn.tasks.selecting.filters.sample import FilterDecision
from cairn.tasks.slime import Sample as SlimeSample
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

# As they stand in a project that uses slime.
REWARDS = """\
from slime.utils.types import Sample


async def reward_func(args, sample: Sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    text = sample.prompt + sample.response
    score = float(sample.label is not None and sample.label in text)
    cut = sample.status == Sample.Status.TRUNCATED
    if len(sample.tokens) < sample.response_length or sample.reward is not None:
        raise ValueError("tokens are those of prompt and response")
    return {"score": score - 0.1 * cut + 0.01 * (sample.response_length % 3), "acc": score, "pred": sample.response[:8]}


async def rank_in_group(args, samples: list[Sample], **kwargs):
    lengths = sorted(sample.response_length for sample in samples)
    return [lengths.index(sample.response_length) / len(lengths) for sample in samples]


def by_place(args, sample):
    return sample.index % 7


"""
FILTERS = """\
import torch

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def odd_places(args, samples: list[Sample], **kwargs):
    assert {sample.group_index for sample in samples} == {3}
    assert [sample.index for sample in samples] == [6, 7]
    assert [sample.loss_mask for sample in samples] == [[1, 0, 1], [1, 0, 1]]
    return True


def check_reward_nonzero_std(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = torch.tensor(rewards, dtype=torch.float64).std() > 1e-6
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def long_enough(args, samples, **kwargs):
    return max(sample.response_length for sample in samples) > 10**6
"""


@pytest.fixture
def rewards(tmp_path: Path) -> Path:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    return file


@pytest.fixture
def filters(tmp_path: Path) -> Path:
    file = tmp_path / "filters.py"
    file.write_text(FILTERS)
    return file


def test_a_reward_grades_a_run(rewards: Path, tiny_assets: Path, tmp_path: Path) -> None:
    reward = {"custom_rm_path": f"{rewards}:reward_func", "reward_key": "score"}
    config = tiny_config(tiny_assets, reward=reward)
    assert setup_problems(config) == []
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        graded = run.read(run.committed(0, Step.REWARD, "00-000")).to_pylist()
        sampled = run.read(run.committed(0, Step.ROLLOUT, "00-000")).to_pylist()
    assert len({row["reward"] for row in graded}) > 1
    for row, sample in zip(graded, sampled, strict=True):
        expected = 0.01 * (len(sample["response_ids"]) % 3) - 0.1 * (sample["status"] == "truncated")
        assert row["reward"] % 1 == pytest.approx(expected % 1, abs=1e-6)
        assert '"acc"' in row["components"]


def test_a_filter_judges_groups_as_ours_of_that_name_does(filters: Path, tiny_assets: Path, tmp_path: Path) -> None:
    judged = []
    for name in (f"{filters}:check_reward_nonzero_std", "check_reward_nonzero_std"):
        option = {"dynamic_sampling_filter": name, "n_samples_per_prompt": 2, "over_sampling_batch_size": 8}
        config = tiny_config(tiny_assets, rollout=option, reward={"rm_type": "random", "custom_rm_path": None})
        assert setup_problems(config) == []
        with tiny_context(str(tmp_path / str(len(judged))), config) as (run, _):
            iteration(run, DirectSteps(run), 0)
            judged.append([run.read(one).to_pylist() for one in run.ledger.commits(0) if one.step is Step.FILTER])
    assert judged[0] == judged[1]
    assert {row["reason"] for row in judged[0][0]} - {None, "surplus"}


def test_a_filter_may_say_no_more_than_whether(filters: Path) -> None:
    decide = get_filter(f"{filters}:long_enough")
    assert takes_samples(f"{filters}:long_enough")
    sample = GradedSample("", None, response_ids=(1,), reward=1.0, loss_mask=(1,))
    assert decide([sample]) == FilterDecision(False, "not_kept")


def test_a_filter_is_told_which_samples_of_the_run_it_judges_and_which_tokens_count(filters: Path) -> None:
    decide = get_filter(f"{filters}:odd_places")
    known: Any = {"response_ids": (1, 2, 3), "loss_mask": (1, 0, 1), "reward": 1.0, "prompt_ids": (1,)}
    samples = [GradedSample("", None, group_id=3, sample_index=place, **known) for place in range(2)]
    assert decide(samples) == FilterDecision(True)
    assert getattr(SlimeSample(), "rollout_id", 5) == 5


def test_a_reward_of_a_group_is_given_all_of_it(rewards: Path) -> None:
    config = RewardConfig(custom_rm_path=f"{rewards}:rank_in_group", group_rm=True)
    samples = [Sample("", None, response_ids=(0,) * length) for length in (3, 1, 2, 5, 5, 4)]
    with GraderPool(config) as grader:
        graded = grader.grade(samples, [0, 0, 0, 1, 1, 1])
    assert [one.reward for one in graded] == pytest.approx([2 / 3, 0, 1 / 3, 1 / 3, 1 / 3, 0])


def test_a_field_that_a_grader_does_not_get_says_why(rewards: Path) -> None:
    with GraderPool(RewardConfig(custom_rm_path=f"{rewards}:by_place")) as grader:
        (graded,) = grader.grade([Sample("", None)])
    assert graded.reward is None
    assert "sample.index is not passed to a grader: the same text gets the same reward" in (graded.error or "")


def test_a_name_that_no_flag_has_is_no_attribute() -> None:
    args = Arguments({"reward_key": "score"})
    assert (getattr(args, "my_penalty", 0.5), args.reward_key, args.rollout_sample_hook_path) == (0.5, "score", [])
    with pytest.raises(BadPlugin, match="slime has no such flag"):
        _ = args.my_penalty
    with pytest.raises(BadPlugin, match=r"args\.rm_url is reward\.rm_url here"):
        getattr(args, "rm_url", None)
