"""The examples of docs/plugins.md, each a file outside the tree, in a run of the real thing."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.flows.iteration import iteration
from cairn.flows.validation import setup_problems
from cairn.storage.commits import Step
from cairn.tasks.batch import arrays
from cairn.tasks.context import RunContext
from cairn.tasks.stale_commits import stale_steps
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
EXAMPLES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, code in EXAMPLES.items():
        (tmp_path / name).write_text(code)
    return tmp_path


def run_once(folder: Path, assets: Path, **sections: dict[str, Any]) -> Iterator[RunContext]:
    config = tiny_config(assets, **sections)
    assert setup_problems(config) == []
    with tiny_context(str(folder / "store"), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
        yield run


def rewards_of(run: RunContext) -> np.ndarray:
    rewards: np.ndarray = run.read(run.committed(0, Step.ADVANTAGE)).column("reward").to_numpy()
    return rewards


def stale(run: RunContext, option: str) -> set[str]:
    """Steps that another source of what an option names makes stale."""
    return {step for _, step, _, _ in stale_steps(run.ledger, run.config, {f"{option}:modules": "0" * 64})}


def test_an_estimator(folder: Path, tiny_assets: Path) -> None:
    option = {"advantage_estimator": f"{folder / 'rloo.py'}:estimate", "use_rollout_logprobs": True}
    for run in run_once(folder, tiny_assets, algorithm=option):
        found = [values[0] for values in arrays(run.read(run.committed(0, Step.ADVANTAGE)), "advantages")]
        groups = rewards_of(run).reshape(-1, 4).astype(float)
        assert groups.std(axis=1).min() > 0
        np.testing.assert_allclose(found, (groups - groups.mean(1, keepdims=True)).ravel() * 4 / 3, atol=1e-6)
        assert stale(run, "algorithm.advantage_estimator") == {"advantage", "train", "sync"}


def test_an_estimator_that_needs_scores(folder: Path, tiny_assets: Path) -> None:
    option = {"advantage_estimator": f"{folder / 'anchored.py'}:estimate", "use_rollout_logprobs": True}
    for run in run_once(folder, tiny_assets, algorithm=option, training={"lr": 1e-2, "num_threads": 1}):
        iteration(run, DirectSteps(run), 1)
        scored, estimated = (run.read(run.committed(1, step)) for step in (Step.SCORE, Step.ADVANTAGE))
        references, advantages = arrays(scored, "ref_log_probs"), arrays(estimated, "advantages")
        rewards = estimated.column("reward").to_numpy()
        apart = [advantage - reward for advantage, reward in zip(advantages, rewards, strict=True)]
        assert max(np.abs(values).max() for values in apart) > 1e-4
        assert [len(values) for values in references] == [len(values) for values in advantages]


def test_a_loss(folder: Path, tiny_assets: Path) -> None:
    option = {"loss_type": f"{folder / 'gspo.py'}:loss", "use_rollout_logprobs": True}
    for run in run_once(folder, tiny_assets, algorithm=option):
        trained = run.committed(0, Step.TRAIN)
        assert trained.metrics["sequence_ratio"] == pytest.approx(1, abs=1e-3)
        assert trained.metrics["grad_norm"] > 0
        assert {"pg_loss", "entropy_loss", "train_rollout_logprob_abs_diff"} <= trained.metrics.keys()
        assert "pg_clipfrac" not in trained.metrics  # that of the built-in loss
        assert stale(run, "algorithm.loss_type") == {"train", "sync"}


def test_a_grader(folder: Path, tiny_assets: Path) -> None:
    for run in run_once(folder, tiny_assets, reward={"custom_rm_path": f"{folder / 'brevity.py'}:grade"}):
        graded = run.read(next(c for c in run.ledger.commits(0) if c.step is Step.REWARD))
        for row in graded.to_pylist():
            low = json.loads(row["components"])["low"]
            assert row["reward"] == pytest.approx(low - 0.01 * round((low - row["reward"]) / 0.01), abs=1e-6)


def test_a_filter(folder: Path, tiny_assets: Path) -> None:
    path = f"{folder / 'spread.py'}:keep"
    sections: dict[str, dict[str, Any]] = {
        "rollout": {
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            "dynamic_sampling_filter": path,
            "max_refill_rounds": 2,
        }
    }
    for run in run_once(folder, tiny_assets, **sections):
        decided = [c for c in run.ledger.commits(0) if c.step is Step.FILTER][-1]
        rows = run.read(decided).to_pylist()
        assert {row["reason"] for row in rows if not row["kept"]} <= {"alike", "surplus"}
        assert all(row["std_reward"] > 0.05 or row["reason"] is None or row["reason"] == "alike" for row in rows)
