"""Megatron's ranks beside a rollout engine of the fleet: experts cut over ranks, memory in turn, weights sent."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cairn.engines.fleet.actors import EngineActor
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.types.errors import EngineDied, EngineError
from cairn.engines.types.types import SamplingParams, TrainBatch
from tests.engines.training.builders import make_batch, model_folder
from tests.engines.training.megatron.cases import EP
from tests.fleets import sync
from tests.ray_fixtures import fleet_config
from tests.requests import group
from tests.waiting import wait_for

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

PROMPTS = [[5 + row, 6, 7, 90 - row] for row in range(4)]
REQUESTS = [one for row, prompt in enumerate(PROMPTS) for one in group(row, prompt, (1, 2), SamplingParams(12))]


@pytest.fixture(scope="module")
def fleet(ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    config = fleet_config(
        model_folder(tmp_path_factory.mktemp("experts"), "qwen3_moe"),
        training={"engine": "megatron", "world_size": 2, "megatron": EP, "lr": 1e-2, "timeout": 500},
        fleet={"colocate": True, "start_timeout": 500, "call_timeout": 300, "update_weight_buffer_size": 64 * 1024},
    )
    with Fleet.start(config, name="megatron", total_steps=4) as fleet:
        yield fleet


def train_once(training: TrainingHandle, version: int | None = None) -> None:
    if version is None:
        version = training.position().weight_version
    training.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))


def first_rank(training: TrainingHandle) -> dict[str, Any]:
    """What rank 0 says of itself while it works."""
    return training.ask(EngineActor.health)


def test_experts_cut_over_ranks_reach_a_rollout_engine_whose_log_probs_are_the_trainers(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.turns.for_training()
        train_once(fleet.training)
        sync(fleet)  # the trainer's memory is away while it gives them out
        assert fleet.training.health()["offloaded"]
        sampled = [completion for part in fleet.rollout[0].generate(REQUESTS) for completion in part]
        fleet.turns.for_training()
        batch = TrainBatch(
            [np.array([*PROMPTS[done.request_id[0]], *done.response_ids], np.int32) for done in sampled],
            [len(done.response_ids) for done in sampled],
            [np.ones(len(done.response_ids), np.uint8) for done in sampled],
        )
        for done, scores in zip(sampled, fleet.training.score(batch, "actor"), strict=True):
            np.testing.assert_allclose(done.log_probs, scores, atol=1e-4)


def test_ranks_whose_memory_is_away_refuse_to_work(fleet: Fleet, tmp_path: Path) -> None:
    fleet.turns.offload_training()
    for work in (
        lambda: train_once(fleet.training),
        lambda: fleet.training.score(make_batch(), "actor"),
        lambda: fleet.training.save(str(tmp_path), "saved"),
    ):
        with pytest.raises(EngineError, match="offloaded: onload it first"):
            work()
    fleet.turns.for_training()
    train_once(fleet.training)


def test_a_rank_killed_in_an_update_leaves_a_checkpoint_from_which_the_update_ends_in_the_same_bits(
    fleet: Fleet, tmp_path: Path
) -> None:
    training = fleet.training
    fleet.turns.for_training()
    training.save(str(tmp_path), "before")
    saved = training.position()
    train_once(training)
    expected = training.position()
    training.load(str(tmp_path), "before")
    _, victim = training.health()["pids"]
    os.kill(victim, signal.SIGSTOP)  # the other rank comes to a collective, and waits there
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(train_once, training, saved.weight_version)
        try:
            wait_for(lambda: not first_rank(training)["intact"])
        finally:
            os.kill(victim, signal.SIGKILL)
        with pytest.raises(EngineDied, match="training:1"):
            update.result()
    training.ensure_alive()
    assert training.position().weight_version == 0
    training.load(str(tmp_path), "before")
    assert training.position().state_digest == saved.state_digest
    train_once(training)
    assert training.position().state_digest == expected.state_digest
