"""Each engine is brought to its weights by itself; what it lacks is published once for all who need it."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.tasks.trainer.sync import publish, serve
from tests.local_fleet import LocalFleet
from tests.tiny_run import tiny_config, tiny_context


class Counted(LocalFleet):
    """Counts publications, and holds the first one up until it is let go."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(config)
        self.publications = 0
        self.go_on = threading.Event()

    def publish(self, version: int, keep: int) -> Any:
        self.publications += 1
        assert self.go_on.wait(60)
        return super().publish(version, keep)


@pytest.fixture
def config(tiny_assets: Path) -> RunConfig:
    return tiny_config(tiny_assets, rollout={"num_engines": 2})


def test_engines_that_lack_what_nobody_published_share_one_publication(config: RunConfig, tmp_path: Path) -> None:
    fleet = Counted(config)
    for handle in fleet.rollout:
        handle.engine.begin_weight_update(9)  # as an engine of a driver that died in an update
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _), ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(serve, run, fleet.rollout[index % 2], None) for index in range(8)]
        fleet.go_on.set()
        for call in calls:
            call.result(60)
    assert [handle.engine.get_weight_version() for handle in fleet.rollout] == [0, 0]
    assert fleet.publications == 1


def test_an_engine_is_served_while_the_trainer_is_at_work(config: RunConfig, tmp_path: Path) -> None:
    fleet = Counted(config)
    fleet.go_on.set()
    with tiny_context(str(tmp_path), config, fleet=fleet) as (run, _):
        published = publish(run, None)
        fleet.rollout[0].engine.begin_weight_update(9)
        with run.weights_lock, ThreadPoolExecutor(1) as pool:  # as a train step has it
            pool.submit(serve, run, fleet.rollout[0], None).result(60)
        assert fleet.rollout[0].engine.weights_checksum() == published.digest
