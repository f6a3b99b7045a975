"""A server that runs elsewhere is used like one's own, and never ended."""

import os
import signal
import socket
from pathlib import Path

import httpx
import pytest
from transformers import PreTrainedModel

from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.rollout.sglang.launch_plan import ServerPlan
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout
from cairn.engines.types.types import SamplingParams
from tests.requests import group
from tests.sglang_server import sglang_config
from tests.waiting import wait_for

pytestmark = [pytest.mark.proof, pytest.mark.timeout(600)]


def connect(url: str, model: Path, log: Path, start_timeout: float = 60.0, **options: float) -> SGLangEngine:
    config = sglang_config().model_copy(update=options)
    return SGLangEngine(str(model), config, "cpu", log, start_timeout, ServerPlan(external_url=url))


REQUESTED = group(0, [5, 6, 7], (1, 2), SamplingParams(4))


def update(engine: SGLangEngine, model: PreTrainedModel, version: int) -> None:
    engine.begin_weight_update(version)
    engine.update_weights({name: value.detach() for name, value in model.named_parameters()})
    engine.end_weight_update()


def test_it_generates_with_our_weights_alone_and_outlives_its_user(
    engine: SGLangEngine, sglang_model: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    outside = connect(engine.server.url, sglang_model, tmp_path / "log")
    assert not outside.check_batch_invariance()
    assert engine.get_weight_version() == 0
    assert outside.get_weight_version() is None, "another run may have called its own weights so"
    with pytest.raises(EngineError, match="no weights of this run"):
        list(outside.generate(REQUESTED))
    update(outside, model, 3)
    assert outside.get_weight_version() == 3
    done = [c for part in outside.generate(REQUESTED) for c in part]
    assert [set(c.weight_versions) for c in done] == [{3}] * 2
    assert outside.health()["server_pid"] is None
    outside.close()
    assert engine.health()["url"] == engine.server.url
    assert not (tmp_path / "log").exists()


def test_a_version_that_is_no_number_is_none_of_ours(
    engine: SGLangEngine, sglang_model: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    outside = connect(engine.server.url, sglang_model, tmp_path / "log")
    update(outside, model, 3)

    def call_it(name: str) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        httpx.post(f"{engine.server.url}/update_weight_version", json=body, timeout=30, trust_env=False)

    call_it("default")
    assert outside.get_weight_version() is None
    call_it("3")
    assert outside.get_weight_version() == 3
    outside.close()


def test_one_that_hangs_is_given_up_and_left_alive(engine: SGLangEngine, sglang_model: Path, tmp_path: Path) -> None:
    checks = {"rollout_health_check_interval": 0.2, "rollout_health_check_timeout": 2.0}
    outside = connect(engine.server.url, sglang_model, tmp_path / "log", **checks)
    pid = engine.server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: outside._hung is not None)
    finally:
        os.kill(pid, signal.SIGCONT)
    with pytest.raises(EngineDied, match=r"did not answer for .* it runs elsewhere"):
        outside.health()
    assert engine.health()["server_pid"] == pid
    outside.close()


def test_nobody_there_is_said_with_the_way_out(sglang_model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:  # and nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(EngineTimeout, match=f"{url} did not serve within 1 s: start it, or take it out"):
            connect(url, sglang_model, tmp_path / "log", start_timeout=1.0)
