"""Options of `reward` that no grader of a run reads are told by name."""

from pathlib import Path
from typing import Any

import pytest

from cairn.flows.driver.validation import setup_problems
from tests.tiny_run import tiny_config

GRADERS = """
import cairn


def grade(sample):
    return 1.0


async def waiting(sample):
    return 1.0


def several(samples):
    return [1.0 for _ in samples]


@cairn.plugin(cached=True)
def kept(sample):
    return 1.0
"""
JUDGE = {"rm_type": "judge", "judge": {"url": "http://127.0.0.1:9/v1", "model": "wise"}}


@pytest.fixture
def graders(tmp_path: Path) -> Path:
    file = tmp_path / "graders.py"
    file.write_text(GRADERS)
    return file


def problems(assets: Path, reward: dict[str, Any], **sections: Any) -> list[str]:
    config = tiny_config(assets, reward={"custom_rm_path": None, **reward}, **sections)
    notes: list[str] = []
    return setup_problems(config, notes.append) + notes


@pytest.mark.parametrize(
    ("reward", "option"),
    [
        ({"rm_type": "math", "reward_key": "score"}, "reward_key (score)"),
        ({**JUDGE, "reward_key": "score"}, "reward_key (score)"),
        ({"rm_type": "dapo", "rm_batch_size": 8}, "rm_batch_size (8)"),
        ({"rm_type": "dapo", "rm_concurrency": 8}, "rm_concurrency (8)"),
        ({**JUDGE, "rm_timeout": 20.0}, "rm_timeout (20.0)"),
        ({**JUDGE, "num_workers": 2}, "num_workers (2)"),
        ({**JUDGE, "rm_memory": 2**28}, f"rm_memory ({2**28})"),
        ({"custom_rm_path": "grade", "rm_concurrency": 8}, "rm_concurrency (8)"),
        ({"custom_rm_path": "several", "group_rm": True, "rm_batch_size": 8}, "rm_batch_size (8)"),
    ],
)
def test_what_no_grader_reads_is_told(tiny_assets: Path, graders: Path, reward: dict[str, Any], option: str) -> None:
    if "custom_rm_path" in reward:
        reward = {**reward, "custom_rm_path": f"{graders}:{reward['custom_rm_path']}"}
    (problem,) = problems(tiny_assets, reward)
    assert problem.startswith(f"reward.{option} has no effect while the grader is ")
    assert problem.endswith("leave it out")


def test_a_box_before_a_grader_that_looks_for_a_mark_is_told(tiny_assets: Path) -> None:
    reward = {"rm_type": "boxed_deepscaler"}
    (problem,) = problems(tiny_assets, reward)
    assert problem.startswith("reward: the grader 'boxed_deepscaler' would never give a reward")


@pytest.mark.parametrize(
    "reward",
    [
        {"rm_type": "dapo", "reward_key": "acc"},
        {"rm_type": "boxed_f1", "reward_key": "f1"},
        {"rm_type": "remote_rm", "rm_url": "http://127.0.0.1:9", "reward_key": "score", "rm_concurrency": 8},
        {**JUDGE, "rm_concurrency": 8},
        {"custom_rm_path": "grade", "reward_key": "score"},
        {"custom_rm_path": "waiting", "rm_concurrency": 8},
        {"custom_rm_path": "kept", "rm_concurrency": 8},
        {"custom_rm_path": "several", "rm_batch_size": 8},
    ],
)
def test_what_a_grader_reads_is_let_pass(tiny_assets: Path, graders: Path, reward: dict[str, Any]) -> None:
    if "custom_rm_path" in reward:
        reward = {**reward, "custom_rm_path": f"{graders}:{reward['custom_rm_path']}"}
    assert problems(tiny_assets, reward) == []


def test_a_benchmark_s_grader_may_read_it(tiny_assets: Path) -> None:
    benchmark = {"name": "held", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 4, "rm_type": "dapo"}
    reward = {"rm_type": "math", "reward_key": "acc"}
    assert problems(tiny_assets, reward, eval={"eval_interval": 1, "benchmarks": [benchmark]}) == []
