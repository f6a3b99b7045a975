"""The reward that is shown is that of all samples, not only of those that were chosen by it."""

from pathlib import Path

import numpy as np
import pytest

from cairn.flows.iteration import iteration
from cairn.flows.reading.metrics import iteration_metrics
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.selection import last_selection, number, unfinished_groups
from cairn.tasks.grading.sample_metrics import sample_metrics
from tests.tasks.generation.test_partial_rollout import partial_config
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

STATISTICS = ("raw_reward", "truncated_ratio", *(f"response_len/{name}" for name in ("mean", "median", "max", "min")))


def test_each_is_over_the_samples_that_have_it() -> None:
    statuses = ["completed", "truncated", "completed", "truncated", "truncated"]
    metrics = sample_metrics(np.array([1.0, 0.0, 0.5]), np.array([2, 8, 4, 8, 8]), statuses)
    assert [metrics[name] for name in STATISTICS] == [0.5, 0.6, 6.0, 8.0, 8, 2]
    assert sample_metrics(np.zeros(0), np.zeros(0, int), []) == {}


def test_what_the_filter_drops_is_part_of_what_is_generated(tiny_assets: Path, tmp_path: Path) -> None:
    """Groups whose label is a multiple of 3 get rewards by length, all others 1; label 5 is never graded."""
    (tmp_path / "judge.py").write_text(
        "def grade(response, label, metadata):\n"
        "    if int(label) == 5:\n"
        "        raise RuntimeError('no judge today')\n"
        "    return (len(response) % 7) / 7 if int(label) % 3 == 0 else 1.0\n"
    )
    config = tiny_config(
        tiny_assets,
        data={"path": str(tiny_assets / "train.jsonl"), "rollout_shuffle": False},
        rollout={"num_rollout": 1, "rollout_batch_size": 3, "dynamic_sampling_filter": "check_reward_nonzero_std"},
        reward={"custom_rm_path": f"{tmp_path / 'judge.py'}:grade"},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        commits = iteration(run, DirectSteps(run), 0)
        tables = {step: [run.read(c) for c in commits if c.step is step] for step in (Step.ROLLOUT, Step.REWARD)}
        ledger = run.ledger
    rewards = [reward for table in tables[Step.REWARD] for reward in table.column("reward").to_pylist()]
    rows = [row for table in tables[Step.ROLLOUT] for row in table.to_pylist()]
    lengths = [len(row["response_ids"]) for row in rows]
    graded = [reward for reward in rewards if reward is not None]
    assert None in rewards, "the witness that something was not graded"
    shown = iteration_metrics(commits, config)
    assert [shown[f"rollout/{name}"] for name in STATISTICS] == pytest.approx(
        [
            np.mean(graded), np.mean([row["status"] == "truncated" for row in rows]),
            np.mean(lengths), np.median(lengths), max(lengths), min(lengths),
        ],
        rel=1e-6,
    )  # fmt: skip
    trained = [shown[f"rollout/trained/{name}"] for name in STATISTICS]
    assert trained[0] < shown["rollout/raw_reward"], "the filter dropped groups of reward 1"
    status = run_status(ledger.store, ledger.run)
    assert (status.reward, status.trained_reward) == (shown["rollout/raw_reward"], trained[0])


def test_a_group_counts_once_in_the_iteration_that_finishes_it(tiny_assets: Path, tmp_path: Path) -> None:
    config = partial_config(tiny_assets)
    with tiny_context(str(tmp_path), config) as (run, _):
        lengths: dict[tuple[int, int], int] = {}
        total = count = 0.0
        for index in range(3):
            commits = iteration(run, DirectSteps(run), index)
            for commit in commits:
                if commit.step is Step.ROLLOUT:
                    rows = run.read(commit).to_pylist()
                    lengths |= {(row["group_id"], row["sample_index"]): len(row["response_ids"]) for row in rows}
            selection = last_selection(run, index)
            waiting = {group for _, _, group in unfinished_groups(run, selection)}
            finished = {key: length for key, length in lengths.items() if key[0] not in waiting}
            grown, samples = sum(finished.values()) - total, len(finished) - count
            assert selection.metrics["response_len/mean"] == pytest.approx(grown / samples)
            total, count = total + grown, count + samples
        assert number(last_selection(run, 0), "unfinished") > 0, "the witness that something was continued"
