"""Forks share what they do not make, replay makes again what was made, diff finds where two runs part."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.session import needs_restore_point, total_steps
from cairn.flows.history.diff import diff
from cairn.flows.history.fork import CannotFork, fork
from cairn.flows.history.replay import Replaying
from cairn.flows.iteration import iteration
from cairn.flows.reading.samples import benchmark_scores
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Parent
from cairn.storage.opening import open_store
from cairn.storage.records import CodeVersion
from cairn.storage.upkeep.verification import verify
from tests.flows.written_runs import new_run, write_run
from tests.tiny_run import DirectSteps, tiny_config, tiny_context, train_digests

ITERATIONS = 4


def make(store: str, name: str, until: int | None = None) -> list[str | None]:
    """Make a run's iterations; the state digests of all of them, shared ones included."""
    ledger = Ledger.open(open_store(store), name)
    config = RunConfig.model_validate(ledger.manifest.config)
    stop = config.rollout.num_rollout if until is None else until
    with tiny_context(store, config, name) as (run, _):
        for index in range(ledger.first_iteration, stop):
            iteration(run, DirectSteps(run), index)
        return train_digests(run, range(stop))


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    eval_set = {"name": "h", "path": str(tiny_assets / "heldout.jsonl"), "rm_type": "random", "max_response_len": 6}
    return tiny_config(
        tiny_assets,
        rollout={
            "num_rollout": ITERATIONS,
            "rollout_batch_size": 3,
            "over_sampling_batch_size": 4,
            "max_age": 1,
            "n_samples_per_prompt": 4,
            "rollout_max_response_len": 12,
        },
        checkpoint={"save_interval": 2},
        eval={"eval_interval": 2, "benchmarks": [eval_set]},
    )


@pytest.fixture(scope="module")
def store(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Holds the run `a`, all of its iterations made."""
    url = str(tmp_path_factory.mktemp("store"))
    with tiny_context(url, config, "a") as (run, _):
        for index in range(ITERATIONS):
            iteration(run, DirectSteps(run), index)
    return url


def opened(store: str, name: str) -> Ledger:
    return Ledger.open(open_store(store), name)


def forked(store: str, origin: str, at: int, name: str, *overrides: str) -> Ledger:
    return fork(opened(store, origin), at, name, overrides)


def files_of(store: str, name: str) -> Sequence[str]:
    return [path for path in open_store(store).find(f"runs/{name}") if "/leases/" not in path]


def test_a_fork_without_changes_repeats_its_parent_bit_for_bit_and_copies_nothing(store: str) -> None:
    ledger = forked(store, "a", 1, "same")
    assert files_of(store, "same") == ["runs/same/run.json"]
    assert (ledger.first_iteration, ledger.last_iteration(), ledger.manifest.parent) == (
        2,
        1,
        Parent(run="a", iteration=1),
    )
    assert make(store, "same") == train_digests_of(store, "a")
    assert not [path for path in files_of(store, "same") if "/000000/" in path or "/000001/" in path]
    found = diff(opened(store, "a"), opened(store, "same"))
    assert (found.parts_at, found.ended, found.options) == (None, None, ())
    assert 0 < found.shared < found.compared


def train_digests_of(store: str, name: str) -> list[str | None]:
    ledger = opened(store, name)
    found = [ledger.find(index, Step.TRAIN) for index in ledger.iterations()]
    return [commit.state_digest for commit in found if commit is not None]


def test_a_fork_of_a_fork_has_the_whole_history(store: str) -> None:
    forked(store, "a", 0, "first", "rollout.rollout_top_k=9")
    make(store, "first", 3)
    forked(store, "first", 2, "second", "rollout.rollout_top_k=8")
    make(store, "second")
    ledger = opened(store, "second")
    assert [ledger.owner(index).run for index in range(ITERATIONS)] == ["a", "first", "first", "second"]
    assert ledger.iterations() == list(range(ITERATIONS))
    checked = list(verify(ledger))
    assert not [finding for check in checked for finding in check.findings]
    assert len({check.name.partition("/")[0] for check in checks_of_commits(checked)}) == ITERATIONS
    status = run_status(ledger.store, "second")
    assert (status.state, status.iterations, status.parent) == (
        "completed",
        ITERATIONS,
        Parent(run="first", iteration=2),
    )
    assert list(benchmark_scores(ledger, RunConfig.model_validate(ledger.manifest.config))["h"]) == [0, 2, 4]


def checks_of_commits(checks: list[Any]) -> list[Any]:
    return [check for check in checks if check.name not in ("run.json", "groups")]


@pytest.mark.parametrize(
    ("override", "parts_at"),
    [
        ("rollout.rollout_temperature=0.7", "000002/rollout.00-000"),
        ("seed=7", "000002/rollout.00-000"),
        ("reward.rm_type=exact_match", "000002/reward.00-000"),
        ("algorithm.grpo_std_normalization=false", "000002/advantage"),
        ("training.lr=0.002", "000002/train"),
    ],
)
def test_diff_names_the_first_step_that_a_change_reaches(store: str, override: str, parts_at: str) -> None:
    name = override.partition("=")[0].replace("_", "-")
    changes = [override] + (["reward.custom_rm_path=null"] if "rm_type" in override else [])
    ledger = forked(store, "a", 1, name, *changes)
    # Iteration 1 ends with a checkpoint: what trains otherwise can start from there.
    assert not needs_restore_point(ledger, RunConfig.model_validate(ledger.manifest.config))
    make(store, name, 3)
    found = diff(opened(store, "a"), opened(store, name))
    assert found.parts_at == parts_at
    assert found.how
    assert override.partition("=")[0] in [option for option, _, _ in found.options]


def test_a_fork_before_its_first_step_is_equal_as_far_as_it_goes(store: str) -> None:
    forked(store, "a", 2, "fresh")
    found = diff(opened(store, "a"), opened(store, "fresh"))
    assert (found.parts_at, found.ended, found.compared) == (None, "fresh", found.shared)
    status = run_status(open_store(store), "fresh")
    assert (status.iterations, status.iteration, status.step) == (3, 3, Step.ROLLOUT)
    assert status.state_digest == train_digests_of(store, "a")[2]


def test_a_fork_that_trains_otherwise_needs_the_weights_its_parent_left(store: str) -> None:
    ledger = forked(store, "a", 2, "faster", "training.lr=0.01", "training.num_steps_per_rollout=2")
    config = RunConfig.model_validate(ledger.manifest.config)
    assert needs_restore_point(ledger, config)
    assert total_steps(ledger, config) == 3 * 1 + 1 * 2


@pytest.mark.parametrize("override", ["algorithm.num_critic_only_steps=0", "training.num_steps_per_rollout=2"])
def test_a_fork_counts_the_updates_of_its_actor_as_its_parent_did(tmp_path: Path, override: str) -> None:
    """How many there were, which Adam and the learning rate follow, is told from the weight version alone."""
    algorithm = {"advantage_estimator": "ppo", "num_critic_only_steps": 1}
    parent = new_run(str(tmp_path), algorithm=algorithm)
    write_run(parent, 2)
    with pytest.raises(CannotFork, match=r"num_critic_only_steps .* as in toy"):
        fork(parent, 1, "younger", [override])


@pytest.mark.parametrize(
    ("at", "name", "overrides", "error", "says"),
    [
        (9, "x", (), CannotFork, "has not trained iteration 9"),
        (1, "x", ("algorithm.advantage_estimator=ppo",), CannotFork, "trained with grpo, without a critic: keep grpo"),
        (1, "x", ("training.lora.r=4",), CannotFork, "training.lora differs from that of a"),
        (1, "x", ("training.engine=megatron",), CannotFork, r"training.engine differs from that of a \(torch\)"),
        (
            1,
            "x",
            ("training.freeze_params_name_list=[norm]",),
            CannotFork,
            r"freeze_\S+ differs from that of a \(none\)",
        ),
        (1, "x", ("training.moe_router_bias_update_rate=1e-3",), CannotFork, r"_rate differs from that of a \(0\)"),
        (
            1,
            "x",
            ("algorithm.use_kl_loss=true", "algorithm.ref_update_interval=2"),
            CannotFork,
            r"ref_update_interval differs from that of a \(null\)",
        ),
        (3, "x", (), CannotFork, "num_rollout is 4"),
        (1, "a", (), CannotFork, "there is a run 'a' already"),
        (1, "../x", (), ValueError, "not a usable name"),
        (1, "x", ("training.lrr=1",), ConfigError, "did you mean training.lr"),
        (1, "x", ("training.lr=-1",), ConfigError, "training.lr is -1"),
        (0, "x", ("rollout.n_samples_per_prompt=2",), ConfigError, "groups of 4 wait after a@0"),
        (1, "x", ("data.path=nowhere.jsonl",), Exception, "nowhere.jsonl"),
    ],
)
def test_what_cannot_be_forked_is_refused_before_anything_is_written(
    store: str, at: int, name: str, overrides: Sequence[str], error: type[Exception], says: str
) -> None:
    before = open_store(store).find("runs")
    with pytest.raises(error, match=says):
        forked(store, "a", at, name, *overrides)
    assert open_store(store).find("runs") == before


def test_every_step_makes_the_same_again(store: str, config: RunConfig, tmp_path: Path) -> None:
    before = {path: size for path, size in open_store(store).find("runs/a").items() if "/leases/" not in path}
    for step in Step:
        if step in (Step.ADMIT, Step.SCORE):  # which this run has not
            continue
        with tiny_context(store, config, "a") as (run, _):
            runner = Replaying(run, {step}, None, open_store(str(tmp_path / step)))
            iteration(run, runner, 1)
        assert runner.replayed, step
        assert [repeated.differences for repeated in runner.replayed] == [()] * len(runner.replayed), step
    assert {path: size for path, size in open_store(store).find("runs/a").items() if "/leases/" not in path} == before


def test_a_step_that_makes_something_else_is_told_with_its_columns(
    store: str, config: RunConfig, tmp_path: Path
) -> None:
    with tiny_context(store, config, "a") as (run, _):
        run.config = config.model_copy(update={"seed": 1})
        runner = Replaying(run, {Step.ROLLOUT}, None, open_store(str(tmp_path)))
        iteration(run, runner, 1)
    (repeated,) = runner.replayed
    assert any("response_ids" in sentence and "rows" in sentence for sentence in repeated.differences)
    assert not any("seconds" in sentence for sentence in repeated.differences)


def test_rewards_of_an_earlier_grader_stay_and_replay_says_what_has_changed(
    tiny_assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reward = str(tmp_path / "store"), {"rm_type": "exact_match", "custom_rm_path": None}
    config = tiny_config(tiny_assets, rollout={"num_rollout": 2, "rollout_batch_size": 2}, reward=reward)
    with tiny_context(store, config) as (run, _):
        iteration(run, DirectSteps(run), 0)
    for version_of in ("cairn.storage.ledger.terms.code_version", "cairn.engines.processes.fingerprint.code_version"):
        monkeypatch.setattr(version_of, lambda: CodeVersion(package="9", commit=None))
    monkeypatch.setattr("cairn.tasks.grading.graders._version_of_built_in", lambda name: "another")
    with tiny_context(store, config) as (run, events):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        assert {name.partition("/")[0] for name in events.executed()} == {"000001"}
        runner = Replaying(run, {Step.REWARD}, None, open_store(str(tmp_path / "scratch")))
        iteration(run, runner, 0)
    assert [version.package for version in run_status(run.ledger.store, "tiny").written_by][-1] == "9"
    (repeated,) = runner.replayed
    assert any("grader_version differ" in sentence for sentence in repeated.differences)
    assert any(sentence.startswith("cairn-rl was") and sentence.endswith("is 9") for sentence in repeated.environment)
