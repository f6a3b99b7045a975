"""Graders that rows of data name for themselves."""

import json
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.reward import RewardConfig
from cairn.flows.driver.validation import data_problems
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.grading.graders import get_grader
from cairn.tasks.grading.pool import GraderPool
from cairn.tasks.rewards.sample import Sample
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

NAMED = ["exact_match", None, "boxed_f1", "f1"]


def samples(*named: Any, key: str = "rm_type") -> list[Sample]:
    return [Sample(r"the \boxed{cat}", "cat", {} if name is None else {key: name}) for name in named]


def test_each_sample_is_graded_by_what_its_row_names() -> None:
    with GraderPool(RewardConfig(rm_type="gsm8k_strict")) as pool:
        graded = pool.grade(samples("f1", None, "exact_match", "boxed_f1", " f1 ", ""))
    assert [one.reward for one in graded] == [pytest.approx(0), 0, 1, 1, pytest.approx(0), 0]
    assert [one.grader for one in graded] == ["f1", "gsm8k_strict", "exact_match", "boxed_f1", "f1", "gsm8k_strict"]
    for one in graded:
        assert one.version == get_grader(RewardConfig(rm_type=one.grader)).version


def test_a_grader_of_one_s_own_goes_before_and_another_field_may_name_them(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def grade(sample):\n    return 0.5\n")
    with GraderPool(RewardConfig(custom_rm_path=f"{tmp_path}/half.py:grade")) as pool:
        assert [one.reward for one in pool.grade(samples("exact_match", None))] == [0.5, 0.5]
    with GraderPool(RewardConfig(rm_type="gsm8k_strict", rm_type_key=None)) as pool:
        assert [one.grader for one in pool.grade(samples("exact_match"))] == ["gsm8k_strict"]
    with GraderPool(RewardConfig(rm_type="gsm8k_strict", rm_type_key="by")) as pool:
        assert [one.grader for one in pool.grade(samples("exact_match", key="by"))] == ["exact_match"]
    with GraderPool(RewardConfig().of("gsm8k_strict")) as pool:
        assert [one.grader for one in pool.grade(samples("exact_match"))] == ["gsm8k_strict"]


def rows(path: Path, named: list[Any]) -> str:
    metadata = [{} if name is None else {"rm_type": name} for name in named]
    made = [{"prompt": f"Sort the digits {i}", "label": str(i), "metadata": one} for i, one in enumerate(metadata)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def test_a_run_grades_every_row_by_its_own(tiny_assets: Path, tmp_path: Path) -> None:
    data = {"path": rows(tmp_path / "rows.jsonl", NAMED), "metadata_key": "metadata"}
    reward = {"custom_rm_path": None, "rm_type": "random"}
    config = tiny_config(tiny_assets, data=data, reward=reward, rollout={"num_rollout": 1, "rollout_batch_size": 2})
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        commits = [commit for commit in run.ledger.commits(0) if commit.step in (Step.ROLLOUT, Step.REWARD)]
        tables = {(commit.step, commit.shard): run.read(commit).to_pylist() for commit in commits}
    seen = set()
    for (step, shard), sampled in tables.items():
        if step is Step.ROLLOUT:
            for row, graded in zip(sampled, tables[Step.REWARD, shard], strict=True):
                expected = NAMED[int(row["label"])] or "random"
                assert (graded["grader"], graded["grader_version"]) == (
                    expected,
                    get_grader(RewardConfig(rm_type=expected)).version,
                )
                seen.add(expected)
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "there is no grader 'maths': set rm_type to one of"),
        (7, "rm_type in the metadata is 7, which names no grader"),
    ],
)
def test_a_row_that_names_none_is_named_before_anything_starts(
    tiny_assets: Path, tmp_path: Path, name: Any, message: str
) -> None:
    path = rows(tmp_path / "rows.jsonl", ["f1", name])
    config = tiny_config(
        tiny_assets,
        data={"path": path, "metadata_key": "metadata"},
        reward={"custom_rm_path": None},
        eval={"benchmarks": [{"name": "h", "path": path, "metadata_key": "metadata", "max_response_len": 4}]},
    )
    problems = data_problems(config)
    assert [problem.partition(":")[0] for problem in problems] == ["data", "eval.benchmarks.0"]
    for problem in problems:
        assert f"{path}, line 2: {message}" in problem
        assert problem.endswith("or name another field of the metadata, or none, in reward.rm_type_key")
    source = {"path": path, "metadata_key": "metadata"}
    mixture = {"mixture": [{"name": "one", **source}, {"name": "two", **source}], "path": ""}
    (problem,) = data_problems(tiny_config(tiny_assets, data=mixture, reward={"custom_rm_path": None}))
    assert f"{path}, line 2: {message}" in problem
    own = {"name": "h", "path": path, "metadata_key": "metadata", "max_response_len": 4, "rm_type": "f1"}
    config = tiny_config(tiny_assets, reward={"custom_rm_path": None}, eval={"benchmarks": [own]})
    assert data_problems(config) == []
