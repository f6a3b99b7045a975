"""Soft overlong punishment against equation 13 of DAPO, as verl computes it."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.tasks.grading.shaping import Overlong, sampled_tokens
from cairn.tasks.rewards.grader import Graded
from tests.mistakes import mistakes
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (16384, 0), (16385, -1 / 4096), (18432, -0.5), (20480, -1), (20481, -1)]
)
def test_the_paper_s_own_lengths(length: int, penalty: float) -> None:
    """Longest 20,480, of which the last 4,096 cost (section 4.1)."""
    assert Overlong(20480, 4096, 1.0).penalty(length) == pytest.approx(penalty)


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0.1, 3), st.data())
def test_up_to_the_longest_length_it_is_verl_s(buffer: int, more: int, factor: float, data: st.DataObject) -> None:
    longest = buffer + more
    length = data.draw(st.integers(0, longest))
    exceeding = length - (longest - buffer)  # verl/workers/reward_manager/dapo.py
    assert Overlong(longest, buffer, factor).penalty(length) == pytest.approx(min(-exceeding / buffer * factor, 0))


def test_what_the_grader_said_stays_beside_it_and_a_failed_sample_stays_failed() -> None:
    shaped = Overlong(10, 4, 2.0).shaped(Graded(1.0, {"answer": "7"}), 8)
    assert shaped == Graded(0.0, {"answer": "7", "raw_reward": 1.0, "overlong_penalty": -1.0})
    assert Overlong(10, 4, 2.0).shaped(Graded(None, error="no"), 10) == Graded(None, error="no")


def test_only_what_was_sampled_has_length() -> None:
    segments = [{"tokens": 3, "call": "0"}, {"tokens": 2, "call": None}, {"tokens": 1, "call": "1"}]
    assert (sampled_tokens(6, segments), sampled_tokens(6, None)) == (4, 6)


def test_a_run_s_rewards_have_it_and_its_evaluations_do_not(tiny_assets: Path, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def grade(response, label, metadata):\n    return 1.0\n")
    benchmark = {"name": "h", "path": str(tiny_assets / "heldout.jsonl"), "max_response_len": 6}
    config = tiny_config(
        tiny_assets,
        reward={"custom_rm_path": f"{tmp_path}/one.py:grade", "overlong_buffer_len": 4},
        eval={"eval_interval": 1, "benchmarks": [benchmark]},
        rollout={"num_rollout": 1},
    )
    longest = config.rollout.rollout_max_response_len
    with tiny_context(str(tmp_path / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        rollout, reward = (run.read(run.committed(0, step, "00-000")) for step in (Step.ROLLOUT, Step.REWARD))
        evals = [run.read(commit) for commit in run.ledger.commits(0) if commit.step is Step.EVAL]
    lengths = [len(ids) for ids in rollout.column("response_ids").to_pylist()]
    assert max(lengths) > longest - 4
    for length, row in zip(lengths, reward.to_pylist(), strict=True):
        assert row["reward"] == pytest.approx(1 - max(0, length - (longest - 4)) / 4)
        assert json.loads(row["components"])["raw_reward"] == 1
    assert {reward for table in evals for reward in table.column("reward").to_pylist()} == {1.0}


def test_options_without_effect_or_sense_are_said(tiny_assets: Path) -> None:
    message = "reward.overlong_penalty_factor (2.0) has no effect while reward.overlong_buffer_len is null; set it to"
    assert message in mistakes(reward={"overlong_penalty_factor": 2.0})
    with pytest.raises(Exception, match=r"overlong_buffer_len \(99\) is above rollout\.rollout_max_response_len"):
        tiny_config(tiny_assets, reward={"overlong_buffer_len": 99})


def test_filters_curricula_and_metrics_go_by_what_the_grader_said(tiny_assets: Path, tmp_path: Path) -> None:
    """All answers of a prompt are right, some of them long: nothing to learn, though the shaped rewards differ."""
    (tmp_path / "one.py").write_text(
        "def grade(response, label, metadata):\n    return float(int(label) % 2)\n\n\n"
        "def keep(samples):\n    assert {sample.reward for sample in samples} in ({0.0}, {1.0})\n    return True\n"
    )
    config = tiny_config(
        tiny_assets,
        reward={"custom_rm_path": f"{tmp_path}/one.py:grade", "overlong_buffer_len": 4},
        rollout={"num_rollout": 1, "dynamic_sampling_filter": "check_reward_nonzero_std_with_fallback"},
    )
    own = {"dynamic_sampling_filter": f"{tmp_path}/one.py:keep"}
    for number, rollout in enumerate(({}, own)):
        variant = config.model_copy(update={"rollout": config.rollout.model_copy(update=rollout)})
        with tiny_context(str(tmp_path / f"store{number}"), variant) as (run, _):
            iteration(run, DirectSteps(run), 0)
            judged = [commit for commit in run.ledger.commits(0) if commit.step is Step.FILTER]
            rewards = pa.concat_tables(
                run.read(commit) for commit in run.ledger.commits(0) if commit.step is Step.REWARD
            )
            trained = run.committed(0, Step.ADVANTAGE).metrics["raw_reward"]
        raw = rewards.column("raw_reward").to_pylist()
        assert set(raw) == {0.0, 1.0}
        assert min(rewards.column("reward").to_pylist()) < 0, "the witness that some are long"
        assert judged[-1].metrics["raw_reward"] == pytest.approx(sum(raw) / len(raw))
        assert 0 <= trained <= 1
        rows = run.read(judged[-1]).to_pylist()
        assert {row["std_reward"] for row in rows} == {0.0}
        assert {row["mean_reward"] for row in rows} <= {0.0, 1.0}
        assert all((row["reason"] or "").startswith("zero_std") for row in rows) == (not number)
