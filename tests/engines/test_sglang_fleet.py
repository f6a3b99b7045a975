"""A fleet whose rollout engine is an SGLang server."""

import os
import signal
from pathlib import Path

import pytest

from engines.cluster import Cluster
from engines.errors import EngineError
from engines.fleet import Fleet
from engines.types import GenerateRequest, SamplingParams
from tests.ray_fixtures import fleet_config
from tests.sglang_server import sglang_config

ASKED = [GenerateRequest(index, [5 + index, 6, 7], (1, 2), SamplingParams(8)) for index in range(3)]


@pytest.mark.timeout(900)
def test_a_killed_server_is_replaced_and_brought_up_to_date(
    sglang_model: Path, ray_cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rollout = sglang_config().model_dump(exclude={"rollout_batch_size", "rollout_max_response_len", "num_rollout"})
    with Fleet.start(fleet_config(sglang_model, rollout=rollout), name="sglang", total_steps=2) as fleet:
        (engine,) = fleet.rollout
        assert not engine.batch_invariant
        assert len([c for part in engine.generate(ASKED) for c in part]) == 6
        first = engine.health()["server_pid"]
        os.kill(first, signal.SIGKILL)
        with pytest.raises(EngineError):
            list(engine.generate(ASKED))
        fleet.ensure_rollout_alive()
        assert fleet.sync_weights() == [0]
        assert len([c for part in engine.generate(ASKED) for c in part]) == 6
        assert engine.health()["server_pid"] != first
        (log,) = Path(".cairn/engines").iterdir()
        assert str(log.absolute()) == engine.health()["log"]
