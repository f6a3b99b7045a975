"""A change lists exactly the steps that read what was changed, and those made from them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.configs.schema.servers import ServerGroup
from cairn.flows.iteration import iteration
from cairn.storage.errors import RunDiffers, StaleCommits
from cairn.storage.ledger import Ledger
from cairn.storage.store import open_store
from cairn.tasks.stale_commits import stale_steps
from tests.tiny_run import DirectSteps, tiny_config, tiny_context


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return tiny_config(tiny_assets, checkpoint={"save_interval": 1}, rollout={**BASE, "num_engines": 2})


@pytest.fixture(scope="module")
def ledger(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    store = tmp_path_factory.mktemp("store")
    with tiny_context(str(store), config) as (run, _):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
    return Ledger.open(open_store(str(store)), "tiny")


BASE = {"num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "rollout_max_response_len": 12}
FIRST = {"rollout", "reward", "filter", "advantage", "train", "checkpoint", "sync"}
FROM_TRAIN = {"train", "checkpoint", "sync"}


@pytest.mark.parametrize(
    ("section", "change", "stale_in_first"),
    [
        ("rollout", {"timeout": 99.0}, set()),
        ("fleet", {"call_timeout": 99.0}, set()),
        ("checkpoint", {"save_interval": 2}, set()),
        ("training", {"timeout": 99.0}, set()),
        ("training", {"lr": 2e-3}, FROM_TRAIN),
        ("algorithm", {"eps_clip": 0.3}, FROM_TRAIN),
        ("algorithm", {"grpo_std_normalization": False}, FROM_TRAIN | {"advantage"}),
        ("algorithm", {"normalize_advantages": True}, FROM_TRAIN | {"advantage"}),
        ("algorithm", {"lambd": 0.9}, FROM_TRAIN | {"advantage"}),
        ("algorithm", {"num_critic_only_steps": 1}, FROM_TRAIN),
        ("algorithm", {"use_opd": True}, FROM_TRAIN | {"advantage"}),
        ("algorithm", {"opd_kl_coef": 0.5}, FROM_TRAIN | {"advantage"}),
        ("rollout", {"dynamic_sampling_filter": "check_reward_nonzero_std"}, FIRST - {"rollout", "reward"}),
        ("reward", {"rm_timeout": 5.0}, FIRST - {"rollout"}),
        ("rollout", {"rollout_top_k": 5}, FIRST),
        ("rollout", {"mask_offpolicy_in_partial_rollout": True}, FIRST - {"rollout", "reward"}),
        ("rollout", {"max_age": 2}, FIRST - {"rollout", "reward"}),
        ("rollout", {"sglang": {"attention_backend": "triton"}}, FIRST),
        ("rollout", {"server_groups": (ServerGroup(num_engines=2, overrides={"attention_backend": "triton"}),)}, FIRST),
        ("rollout", {"num_engines": 1}, set()),
        ("rollout", {"num_threads": 2}, FIRST),
        ("rollout", {"max_running_requests": 8}, FIRST),
        ("training", {"gradient_checkpointing": True}, FROM_TRAIN),
        ("training", {"num_steps_per_rollout": 2}, FROM_TRAIN | {"advantage"}),
    ],
)
def test_another_option_makes_its_readers_and_what_was_made_from_them_stale(
    ledger: Ledger, config: RunConfig, section: str, change: Mapping[str, Any], stale_in_first: set[str]
) -> None:
    changed = config.model_copy(update={section: getattr(config, section).model_copy(update=dict(change))})
    stale = stale_steps(ledger, changed, {})
    assert {step for iteration, step, _, _ in stale if iteration == 0} == stale_in_first
    # The second iteration was sampled from the weights of the first.
    assert {step for iteration, step, _, _ in stale if iteration == 1} == (
        FIRST if "train" in stale_in_first else stale_in_first
    )
    shards = {(iteration, step, shard) for iteration, step, shard, _ in stale}
    assert len(shards) == len(stale)


def test_another_grader_makes_every_reward_stale_and_no_rollout_of_the_first_iteration(
    ledger: Ledger, config: RunConfig
) -> None:
    stale = stale_steps(ledger, config, {"reward.custom_rm_path": "0" * 64})
    why = {(iteration, step, shard): reason for iteration, step, shard, reason in stale}
    assert why[0, "reward", "00-000"] == why[1, "reward", "00-001"] == "reward.custom_rm_path"
    assert why[0, "filter", "00"] == "000000/reward.00-000, 000000/reward.00-001"
    assert (0, "rollout", "00-000") not in why
    assert why[1, "rollout", "00-000"].endswith("000000/train")


def test_a_grader_that_was_changed_under_a_run_stops_it(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tmp_path / "mine.py"
    grader.write_text("def grade(response, label, metadata):\n    return float(len(response) % 5)\n")
    config = tiny_config(tiny_assets, reward={"custom_rm_path": f"{grader}:grade"})
    with tiny_context(str(tmp_path), config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    grader.write_text("def grade(response, label, metadata):\n    return float(len(response) % 6)\n")
    with pytest.raises(RunDiffers, match=r"reward\.custom_rm_path"), tiny_context(str(tmp_path), config):
        pass


def test_a_step_whose_commit_was_made_from_something_else_is_not_taken(ledger: Ledger, config: RunConfig) -> None:
    changed = config.model_copy(update={"seed": 43})
    with tiny_context(ledger.store.url, config) as (run, _):
        run.config = changed
        with pytest.raises(StaleCommits, match=r"000001/rollout\.00-000: changed: configuration"):
            iteration(run, DirectSteps(run), 1)
