"""Whole iterations through the real engines, without Ray and Prefect."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from cairn.configs.schema.run import RunConfig
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import Disposition
from cairn.storage.store.errors import Damaged
from cairn.tasks.batch.batch import arrays
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.selection import last_selection, trained_groups
from cairn.tasks.halves import learning_steps
from cairn.tasks.selecting.filter import BatchNotFilled
from cairn.tasks.trainer.recovery import ReplayDiverged, restore_trainer
from tests.local_fleet import LocalFleet
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

DRAWS_TWICE = {"dynamic_sampling_filter": "check_reward_nonzero_std", "over_sampling_batch_size": 6}


def run_iterations(store: Path, config: RunConfig, count: int, fleet: LocalFleet | None = None) -> list[str | None]:
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        for index in range(count):
            iteration(run, DirectSteps(run), index)
        return train_digests(run, range(count))


def test_a_step_that_is_committed_does_not_run_again(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    first = run_iterations(tmp_path, config, 2)
    with tiny_context(str(tmp_path), config) as (run, events):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        assert train_digests(run, range(2)) == first
    assert events.executed() == []
    assert len(events.adopted()) == 12


@pytest.mark.parametrize(
    "save_interval", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(None, marks=pytest.mark.slow)]
)
def test_a_fresh_driver_goes_on_to_the_undisturbed_runs_state(
    tiny_assets: Path, tmp_path: Path, save_interval: int | None
) -> None:
    config = tiny_config(tiny_assets, checkpoint={"save_interval": save_interval})
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 3)
    run_iterations(tmp_path / "resumed", config, 2)
    assert run_iterations(tmp_path / "resumed", config, 3) == undisturbed


def test_an_update_that_was_done_but_not_committed_is_adopted(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 1)
    fleet = LocalFleet(config)
    with tiny_context(str(tmp_path / "lost"), config, fleet=fleet) as (run, _):
        run.commit = _dies_at(run, Step.TRAIN)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            iteration(run, DirectSteps(run), 0)
    assert fleet.training.updates == 1
    assert run_iterations(tmp_path / "lost", config, 1, fleet) == undisturbed
    assert fleet.training.updates == 1


def test_an_engine_that_was_trained_on_something_else_is_discarded(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    undisturbed = run_iterations(tmp_path / "one", config, 2)
    other = LocalFleet(config)
    run_iterations(tmp_path / "other", tiny_config(tiny_assets, training={"lr": 5e-3, "num_threads": 1}), 1, other)
    assert run_iterations(tmp_path / "two", config, 2, other) == undisturbed


def test_replay_stops_at_a_state_that_is_not_the_committed_one(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    run_iterations(tmp_path, config, 2)
    with tiny_context(str(tmp_path), config) as (run, _):
        trained = run.committed(1, Step.TRAIN)
        run._commits.add((1, Step.TRAIN, None), trained.model_copy(update={"state_digest": "0" * 64}))
        with pytest.raises(
            ReplayDiverged, match=rf"000001/train: expected state digest 0{{64}}, found {trained.state_digest}"
        ):
            restore_trainer(run, run.committed(1, Step.TRAIN))
        assert run.replays.take().steps == 1, "that of iteration 0 was done again, and is told by the next commit"


def test_an_altered_snapshot_stops_the_replay_and_is_named(tiny_assets: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_assets)
    run_iterations(tmp_path, config, 1)
    (snapshot,) = tmp_path.glob("runs/tiny/iterations/000000/advantage/*/*.parquet")
    data = bytearray(snapshot.read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    snapshot.write_bytes(data)
    found = hashlib.sha256(data).hexdigest()
    message = rf"iterations/000000/advantage/.*{snapshot.name} .* expected .* {expected}, found .* {found}"
    with tiny_context(str(tmp_path), config) as (run, _), pytest.raises(Damaged, match=message):
        restore_trainer(run, run.committed(0, Step.TRAIN))


def test_rounds_refill_the_batch_and_the_surplus_starts_the_next_iteration(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tiny_assets / "half.py"
    grader.write_text(
        "def grade(response, label, metadata):\n"
        "    return len(response) % 7 if int(label) % 3 == 0 else 1.0  # two groups of three have one reward\n"
    )
    config = tiny_config(
        tiny_assets,
        rollout={
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
            **DRAWS_TWICE,
        },
        reward={"custom_rm_path": f"{grader}:grade"},
    )
    with tiny_context(str(tmp_path), config) as (run, _):
        buffered = 0
        for index in range(3):
            commits = iteration(run, DirectSteps(run), index)
            selection = last_selection(run, index)
            rows = run.read(selection).to_pylist()
            trained = trained_groups(run, selection)
            assert len(trained) == 4
            assert all(row["std_reward"] > 0 for row in rows if row["disposition"] == Disposition.TRAIN)
            assert selection.metrics["rounds"] > 1
            assert sum(iteration_ < index for iteration_, _, _ in trained) == min(4, buffered)
            drawn = sum(commit.metrics["samples"] for commit in commits if commit.step == Step.ROLLOUT) / 4
            assert len(rows) == drawn + buffered
            buffered = selection.values["buffered"]  # type: ignore[assignment]
        seen = [group for index in range(3) for _, _, group in trained_groups(run, last_selection(run, index))]
        assert len(set(seen)) == 12


def test_a_batch_that_cannot_be_filled_names_the_reasons(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tiny_assets / "constant.py"
    grader.write_text("def grade(response, label, metadata):\n    return 1.0\n")
    rollout = {
        "num_rollout": 1,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 4,
        "rollout_max_response_len": 8,
        "max_refill_rounds": 2,
    }
    config = tiny_config(
        tiny_assets,
        rollout={**rollout, "dynamic_sampling_filter": "check_reward_nonzero_std"},
        reward={"custom_rm_path": f"{grader}:grade"},
    )
    with (
        tiny_context(str(tmp_path / "a"), config) as (run, _),
        pytest.raises(BatchNotFilled, match=r"after 2 rounds only 0 of 2 groups were kept \(\{'zero_std_1.0': 4\}\)"),
    ):
        iteration(run, DirectSteps(run), 0)
    fallback = "check_reward_nonzero_std_with_fallback"
    config = config.model_copy(
        update={"rollout": config.rollout.model_copy(update={"dynamic_sampling_filter": fallback})}
    )
    assert len(run_iterations(tmp_path / "b", config, 1)) == 1


def test_where_every_sample_fails_the_first_round_ends_with_their_error(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tmp_path / "raises.py"
    grader.write_text("def grade(response, label, metadata):\n    return metadata[response]\n")
    config = tiny_config(tiny_assets, rollout={"num_rollout": 1}, reward={"custom_rm_path": f"{grader}:grade"})
    says = r"iteration 0: 16 of 16 samples failed, 16 of them with: KeyError: .* \(raises.py:2\); correct raises.py:2"
    with tiny_context(str(tmp_path / "a"), config) as (run, _), pytest.raises(BatchNotFilled, match=says):
        iteration(run, DirectSteps(run), 0)
    with tiny_context(str(tmp_path / "a"), config) as (run, _):
        assert run.find(0, Step.ROLLOUT, "01-000") is None


def test_a_grader_that_fails_costs_the_group_and_never_gives_a_zero(tiny_assets: Path, tmp_path: Path) -> None:
    grader = tiny_assets / "fails.py"
    grader.write_text(
        "def grade(response, label, metadata):\n"
        "    if int(label) % 4 == 1:\n"
        "        raise RuntimeError('no judge today')\n"
        "    return float(len(response) % 5)\n"
    )
    config = tiny_config(tiny_assets, reward={"custom_rm_path": f"{grader}:grade"})
    fails, seen = 0, set()
    with tiny_context(str(tmp_path), config) as (run, _):
        for index in range(3):
            commits = iteration(run, DirectSteps(run), index)
            labels = {
                row["group_id"]: int(row["label"])
                for commit in commits
                if commit.step == Step.ROLLOUT
                for row in run.read(commit).to_pylist()
            }
            ungraded = {group for group, label in labels.items() if label % 4 == 1}
            graded = [row for c in commits if c.step == Step.REWARD for row in run.read(c).to_pylist()]
            for row in graded:
                failed = row["group_id"] in ungraded
                assert (row["status"] == "failed") == (row["reward"] is None) == failed
                assert failed == ("no judge today" in (row["error"] or ""))
            selection = last_selection(run, index)
            dropped = {row["group_id"]: row["reason"] for row in run.read(selection).to_pylist() if row["reason"]}
            assert dropped == dict.fromkeys(ungraded, "failed_sample")
            assert len(trained_groups(run, selection)) == 4
            seen |= {*labels}
            fails += len(ungraded)
    assert fails > 0, "the witness that a grader failed"
    assert len(seen) == 12 + fails


@pytest.mark.proof
@pytest.mark.parametrize(
    ("algorithm", "training"),
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.01, "kl_loss_type": "low_var_kl"}, {"num_steps_per_rollout": 2}),
        ({"use_tis": True, "calculate_per_token_loss": True}, {"global_batch_size": 16}),
        (
            {
                "advantage_estimator": "ppo",
                "kl_coef": 0.05,
                "gamma": 0.99,
                "lambd": 0.95,
                "normalize_advantages": True,
                "num_critic_only_steps": 1,
            },
            {"num_steps_per_rollout": 2, "critic_lr": 3e-3, "critic_lr_warmup_iters": 2},
        ),
        ({"use_opd": True, "opd_kl_coef": 0.5}, {"lora": {"r": 4}}),
    ],
)
def test_scored_algorithms_train_and_resume(
    tiny_assets: Path, tmp_path: Path, algorithm: dict[str, object], training: dict[str, object]
) -> None:
    path = str(tiny_assets / "model")
    config = tiny_config(
        tiny_assets,
        model={"path": path, "teacher_path": path if "use_opd" in algorithm else None},
        algorithm={"use_rollout_logprobs": False, **algorithm},
        training={"lr": 1e-3, "num_threads": 1, **training},
    )
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 3)
    run_iterations(tmp_path / "resumed", config, 2)
    assert run_iterations(tmp_path / "resumed", config, 3) == undisturbed
    with tiny_context(str(tmp_path / "resumed"), config) as (run, _):
        assert run.committed(2, Step.TRAIN).weight_version_out == 3 * config.training.num_steps_per_rollout
        made = sorted(run.ledger.commits(2), key=lambda commit: commit.started_at)
        learned = [commit.step for commit in made if commit.step not in (Step.ROLLOUT, Step.REWARD, Step.FILTER)]
        assert learned == learning_steps(config, 2), "what tells the next step has the order of what makes it"


def test_rewards_are_lowered_where_the_policy_has_left_the_reference(tiny_assets: Path, tmp_path: Path) -> None:
    algorithm = {"advantage_estimator": "ppo", "kl_coef": 0.5, "use_rollout_logprobs": False}
    config = tiny_config(tiny_assets, algorithm=algorithm, training={"lr": 1e-2, "num_threads": 1})
    run_iterations(tmp_path, config, 2)
    with tiny_context(str(tmp_path), config) as (run, _):
        scored = run.read(run.committed(1, Step.SCORE))
        estimated = run.read(run.committed(1, Step.ADVANTAGE))
    policy, ref = (arrays(scored, name) for name in ("log_probs", "ref_log_probs"))
    divergences = [
        (policy_log_probs.astype(float) - ref_log_probs).sum()
        for policy_log_probs, ref_log_probs in zip(policy, ref, strict=True)
    ]
    assert max(map(abs, divergences)) > 1e-3
    # With gamma and lambd 1 the return of a sample's first token is all that follows.
    returns = [sample[0] for sample in arrays(estimated, "returns")]
    expected = estimated.column("reward").to_numpy() - 0.5 * np.array(divergences)
    np.testing.assert_allclose(returns, expected, atol=1e-5)


def _dies_at(run: RunContext, step: Step):  # type: ignore[no-untyped-def]
    """A driver that ends between the files of a step and its commit."""
    commit = run.commit

    def dying(**fields: object):  # type: ignore[no-untyped-def]
        if fields["step"] == step:
            raise KeyboardInterrupt
        return commit(**fields)

    return dying
