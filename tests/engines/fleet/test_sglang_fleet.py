"""A fleet of two SGLang servers behind a router, and what it does when a part of it dies or hangs."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import Completion, GenerateRequest, SamplingParams
from tests.engines.training.builders import make_batch
from tests.fleets import sync, versions
from tests.ray_fixtures import fleet_config
from tests.requests import group
from tests.sglang_server import running, sglang_config
from tests.waiting import wait_for

GROUPS, SAMPLES = 32, 2  # so many that no drawing of ports leaves a server without a group
HANGS_AFTER = 15.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def requests(max_new_tokens: int = 8) -> list[GenerateRequest]:
    params = SamplingParams(max_new_tokens)
    return [one for index in range(GROUPS) for one in group(index, [5 + index, 6, 7], range(SAMPLES), params)]


def generate(engine: RolloutHandle, max_new_tokens: int = 8) -> list[Completion]:
    return [completion for part in engine.generate(requests(max_new_tokens)) for completion in part]


@pytest.fixture(scope="module")
def fleet(sglang_model: Path, ray_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    rollout = sglang_config().model_dump(exclude={"rollout_batch_size", "rollout_max_response_len", "num_rollout"})
    rollout |= {
        "num_engines": 2,
        "router": {"policy": "consistent_hashing"},
        "rollout_health_check_interval": 1.0,
        "rollout_health_check_timeout": HANGS_AFTER,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fleet"))
        config = fleet_config(sglang_model, rollout=rollout, fleet={"start_timeout": 400})
        with Fleet.start(config, name="sglang", total_steps=2) as fleet:
            yield fleet


@pytest.fixture(autouse=True)
def _up_to_date(fleet: Fleet) -> None:
    bring_up_to_date(fleet)


def bring_up_to_date(fleet: Fleet) -> None:
    """As a step of a run does before it generates."""
    sync(fleet)


def routed(fleet: Fleet) -> set[str]:
    """The servers that the router knows."""
    assert fleet.router is not None
    return set(fleet.router.health()["workers"])


def urls(fleet: Fleet) -> set[str]:
    return {engine.health()["url"] for engine in fleet.rollout}


def generated_by(engine: RolloutHandle) -> int:
    """Requests that its server has answered."""
    return Path(engine.health()["log"]).read_text().count("POST /generate")


def scheduler(server: psutil.Process) -> psutil.Process:
    (actual,) = [child for child in server.children() if "scheduler" in child.cmdline()[0]]
    return actual


def test_one_engine_generates_on_every_server_and_each_group_on_one(fleet: Fleet) -> None:
    assert routed(fleet) == urls(fleet)
    before = [generated_by(engine) for engine in fleet.rollout]
    assert len(generate(fleet.rollout[0])) == GROUPS * SAMPLES
    shares = [generated_by(engine) - count for engine, count in zip(fleet.rollout, before, strict=True)]
    assert sum(shares) == GROUPS * SAMPLES
    assert all(share and share % SAMPLES == 0 for share in shares)


def test_a_server_gets_no_request_until_it_serves_the_weights_of_the_others(fleet: Fleet) -> None:
    version = fleet.training.position().weight_version
    fleet.training.train(make_batch(), num_steps=1, expected_version=version, input_digest="")
    fleet.weights.publish(version + 1, keep=1)
    first, second = fleet.rollout
    fleet.weights.serve(first, version + 1)
    assert routed(fleet) == {first.health()["url"]}
    fleet.weights.serve(second, version + 1)
    assert routed(fleet) == urls(fleet)
    assert {int(v) for done in generate(fleet.rollout[1]) for v in done.weight_versions} == {version + 1}


@pytest.mark.parametrize(
    ("strike", "victim"),
    [
        (signal.SIGKILL, lambda server: server),
        (signal.SIGSTOP, scheduler),  # tests/chaos/test_sglang.py stops all of a server
    ],
    ids=["killed", "scheduler stopped"],
)
def test_samples_of_a_server_that_dies_or_hangs_come_from_the_others_and_it_is_replaced(
    fleet: Fleet, strike: signal.Signals, victim: Callable[[psutil.Process], psutil.Process]
) -> None:
    engine = fleet.rollout[1]
    before = engine.health()
    server = psutil.Process(before["server_pid"])
    struck = victim(server)

    def hit() -> float:
        wait_for(lambda: running(engine.health()), 60)
        struck.send_signal(strike)
        began = time.monotonic()
        server.wait(180)
        return time.monotonic() - began

    with ThreadPoolExecutor(1) as pool:
        hitting = pool.submit(hit)
        assert len(generate(fleet.rollout[0], max_new_tokens=200)) == GROUPS * SAMPLES
        assert hitting.result() < 4 * HANGS_AFTER
    with pytest.raises(EngineError):
        engine.health()
    bring_up_to_date(fleet)
    after = engine.health()
    assert after["server_pid"] != before["server_pid"]
    assert after["restarts"] == before["restarts"] + 1
    assert versions(fleet) == [fleet.training.position().weight_version] * 2
    assert routed(fleet) == urls(fleet)
    assert len(generate(engine)) == GROUPS * SAMPLES


def test_a_killed_router_is_replaced_and_given_its_servers_again(fleet: Fleet) -> None:
    assert fleet.router is not None
    os.kill(fleet.router.health()["server_pid"], signal.SIGKILL)
    with pytest.raises(EngineError):
        generate(fleet.rollout[0])
    bring_up_to_date(fleet)
    assert routed(fleet) == urls(fleet)
    assert len(generate(fleet.rollout[0])) == GROUPS * SAMPLES


def test_a_router_dies_with_its_actor(fleet: Fleet) -> None:
    assert fleet.router is not None
    health = fleet.router.health()
    router = psutil.Process(health["server_pid"])
    os.kill(health["pid"], signal.SIGKILL)
    wait_for(lambda: not router.is_running(), 30)
