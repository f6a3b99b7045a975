"""One update a train step, whatever is lost between the update and its commit; and replay to the same weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import EngineDied, EngineTimeout
from cairn.flows.iteration import iteration
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.store.errors import StoreError
from cairn.tasks.durable.context import RunContext
from tests.local_fleet import LocalFleet
from tests.tasks.test_iteration import run_iterations
from tests.tiers import Tier, marks
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

STEPS = 2
"""Optimizer steps a rollout."""


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return tiny_config(tiny_assets, training={"lr": 1e-3, "num_threads": 1, "num_steps_per_rollout": STEPS})


@pytest.fixture(scope="module")
def undisturbed(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return run_iterations(tmp_path_factory.mktemp("undisturbed"), config, 3)


@pytest.fixture(scope="module")
def ppo(config: RunConfig) -> RunConfig:
    """The critic alone is trained in the first iteration."""
    fields = {"advantage_estimator": "ppo", "num_critic_only_steps": 1, "lambd": 0.95}
    return config.model_copy(update={"algorithm": config.algorithm.model_copy(update=fields)})


@pytest.fixture(scope="module")
def undisturbed_ppo(ppo: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return run_iterations(tmp_path_factory.mktemp("ppo"), ppo, 3)


def lose(run: RunContext, fleet: LocalFleet, point: str, strike: Callable[[], None]) -> None:
    """Let `strike` interrupt the next train step at a point on its way from the update to the commit."""
    train, commit = fleet.training.train, run.commit
    pending = [point]

    def passing(here: str) -> None:
        if pending == [here]:
            pending.clear()
            strike()

    def training(*args: Any, **kwargs: Any) -> Any:
        passing("asked")
        result = train(*args, **kwargs)
        passing("updated")
        return result

    def committing(**fields: Any) -> Commit:
        if fields["step"] is not Step.TRAIN:
            return commit(**fields)
        passing("returned")
        # Straight to the ledger: a driver that lost the reply has not noted that the commit is there.
        made = run.ledger.commit(**fields)
        passing("committed")
        return made

    fleet.training.train = training  # type: ignore[method-assign]
    run.commit = committing  # type: ignore[method-assign]


ONE_OF_EACH = {("driver", "updated"), ("actor", "updated"), ("reply", "returned"), ("reply", "committed")}
"""Losses that an update survives, one that its commit survives, and each kind of loss: the others are beside them."""


@pytest.mark.parametrize(
    ("lost", "point"),
    [
        pytest.param(lost, point, marks=marks(Tier.QUICK if (lost, point) in ONE_OF_EACH else Tier.PROOFS))
        for lost in ("driver", "actor", "reply")
        for point in ("asked", "updated", "returned", "committed")
    ],
)
def test_a_train_step_is_one_update_whatever_is_lost_and_when(
    config: RunConfig, undisturbed: list[str | None], tmp_path: Path, lost: str, point: str
) -> None:
    check_that_a_train_step_is_one_update(config, undisturbed, tmp_path, lost, point)


@pytest.mark.proof
@pytest.mark.parametrize(("lost", "point"), [("driver", "updated"), ("actor", "updated"), ("reply", "returned")])
def test_actor_and_critic_are_updated_together_whatever_is_lost(
    ppo: RunConfig, undisturbed_ppo: list[str | None], tmp_path: Path, lost: str, point: str
) -> None:
    check_that_a_train_step_is_one_update(ppo, undisturbed_ppo, tmp_path, lost, point)


def check_that_a_train_step_is_one_update(
    config: RunConfig, undisturbed: list[str | None], store: Path, lost: str, point: str
) -> None:
    fleet = LocalFleet(config)
    reply = EngineTimeout if point in ("asked", "updated") else StoreError
    error = {"driver": KeyboardInterrupt, "actor": EngineDied, "reply": reply}[lost]

    def strike() -> None:
        if lost == "actor":
            fleet.training.restart()
        raise error("lost")

    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        iteration(run, DirectSteps(run), 0)
        lose(run, fleet, point, strike)
        with pytest.raises(error, match="lost"):
            iteration(run, DirectSteps(run), 1)
        if lost != "driver":
            iteration(run, DirectSteps(run), 1)  # as the retry of the step does
    assert run_iterations(store, config, 3, fleet) == undisturbed
    # An engine that was lost replays what is committed; what was updated and not committed then is lost with it.
    repeated = 0 if lost != "actor" else 1 if point == "asked" else 2
    assert fleet.training.updates == 3 + repeated
    with tiny_context(str(store), config, fleet=fleet) as (run, _):
        trained = [run.committed(index, Step.TRAIN) for index in range(3)]
    assert [(commit.weight_version_in, commit.weight_version_out) for commit in trained] == [(0, 2), (2, 4), (4, 6)]


@pytest.mark.proof
@pytest.mark.parametrize("save_interval", [2, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", ["torch", pytest.param("megatron", marks=pytest.mark.slow)])
def test_a_reference_that_follows_the_policy_is_the_same_after_a_kill(
    tiny_assets: Path, tmp_path: Path, engine: str, save_interval: int | None
) -> None:
    """Killed with all its engines where the update that makes the policy the reference is done and not committed, and
    again after a step that was held against the new one."""
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.5, "ref_update_interval": 2}
    rollout = {"num_rollout": 5, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 4}
    config = tiny_config(
        tiny_assets,
        algorithm={**kl, "use_rollout_logprobs": False},
        rollout=rollout,
        training={"lr": 1e-2, "num_threads": 1, "engine": engine, "num_steps_per_rollout": 2},
        checkpoint={"save_interval": save_interval},
    )
    undisturbed = run_iterations(tmp_path / "undisturbed", config, 5)
    with tiny_context(str(tmp_path / "undisturbed"), config) as (run, _):
        scored = [run.read(run.committed(index, Step.SCORE)).to_pylist() for index in range(5)]
    apart = [max(abs(a - b) for row in rows for a, b in pairs_of(row)) for rows in scored]
    assert max(apart[index] for index in (0, 2, 4)) < 1e-5  # the reference is the policy
    assert min(apart[index] for index in (1, 3)) > 1e-3

    def strike() -> None:
        raise KeyboardInterrupt

    for index in (1, 4):
        fleet = LocalFleet(config)
        run_iterations(tmp_path / "killed", config, index, fleet)
        with tiny_context(str(tmp_path / "killed"), config, fleet=fleet) as (run, _):
            lose(run, fleet, "updated", strike)
            with pytest.raises(KeyboardInterrupt):
                iteration(run, DirectSteps(run), index)
    assert run_iterations(tmp_path / "killed", config, 5) == undisturbed


def pairs_of(row: dict[str, Any]) -> Iterator[tuple[float, float]]:
    return zip(row["log_probs"], row["ref_log_probs"], strict=True)


@pytest.fixture(scope="module")
def long_undisturbed(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    return run_iterations(tmp_path_factory.mktemp("long"), long_config(tiny_assets, 1), 7)


def long_config(assets: Path, save_interval: int | None) -> RunConfig:
    rollout = {"num_rollout": 7, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 8}
    return tiny_config(assets, rollout=rollout, checkpoint={"save_interval": save_interval})


@pytest.mark.parametrize("save_interval", [5, *(pytest.param(one, marks=pytest.mark.proof) for one in (1, None))])
def test_a_driver_killed_with_its_engines_is_succeeded_to_the_same_weights(
    tiny_assets: Path, tmp_path: Path, long_undisturbed: list[str | None], save_interval: int | None
) -> None:
    config = long_config(tiny_assets, save_interval)
    fleet = LocalFleet(config)

    def strike() -> None:
        raise KeyboardInterrupt

    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        for index in range(6):
            iteration(run, DirectSteps(run), index)
        lose(run, fleet, "returned", strike)
        with pytest.raises(KeyboardInterrupt):
            iteration(run, DirectSteps(run), 6)
    successor = LocalFleet(config)
    assert run_iterations(tmp_path, config, 7, successor) == long_undisturbed
    replayed = {1: 0, 5: 1, None: 6}[save_interval]
    assert successor.training.updates == replayed + 1
