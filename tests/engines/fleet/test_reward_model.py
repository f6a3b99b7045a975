"""The reward model as an actor of a fleet."""

import os
import signal
from pathlib import Path

import pytest

from cairn.configs.schema.reward import RewardModelConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.scoring.reward_model import PromptAndResponse, RewardModel
from cairn.engines.types.errors import BadModel
from tests.ray_fixtures import fleet_config
from tests.reward_models import write_reward_model
from tests.waiting import wait_for

pytestmark = pytest.mark.proof


def test_it_scores_beside_the_others_and_is_made_again_where_it_dies(
    tiny_assets: Path, tmp_path: Path, ray_cluster: Cluster
) -> None:
    folder = write_reward_model(tmp_path / "reward", tiny_assets / "model")
    reward = {"rm_type": "reward_model", "reward_model": {"path": str(folder)}}
    config = fleet_config(tiny_assets / "model", reward=reward)
    requested = [
        PromptAndResponse(({"role": "user", "content": f"Sort {i}."},), f"Sort {i}.", "1 2 3") for i in range(3)
    ]
    here = RewardModel(RewardModelConfig(path=str(folder))).score(requested)
    with pytest.raises(BadModel, match="reward_model has loaded another model than the run's"):
        Fleet.start(config, name="altered", total_steps=1, model_digests={"reward_model": "0" * 64})
    with Fleet.start(config, name="scored", total_steps=1) as fleet:
        assert fleet.scorer.score(requested) == here
        health = fleet.health()["reward_model"]
        assert isinstance(health, dict)
        assert (health["model"], health["device"], health["scored"]) == (str(folder), "cpu", 3)
        (pid,) = health["pids"]
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes())
        assert fleet.scorer.score(requested) == here
        assert fleet.scorer.restarts == 1
        ended = fleet.scorer.health()["pids"]
    wait_for(lambda: not Path(f"/proc/{ended[0]}").exists())
