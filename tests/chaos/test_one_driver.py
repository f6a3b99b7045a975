"""Of several driver processes on one run, one drives it, whoever else believes to."""

import os
import signal
from pathlib import Path

import pytest

from cairn.storage.ledger.leases import newest_lease
from cairn.storage.opening import open_store
from tests.chaos.runs import Disturbed
from tests.s3 import S3Server, use_server
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.fixture
def short_run(disturbed: Disturbed, tiny_assets: Path) -> Disturbed:
    """Two iterations of the smallest kind."""
    disturbed.warm = True
    rollout = {"num_rollout": 2, "rollout_batch_size": 2, "n_samples_per_prompt": 4, "rollout_max_response_len": 8}
    disturbed.config_file = disturbed.folder / "config.json"
    disturbed.config_file.write_text(tiny_config(tiny_assets, rollout=rollout).model_dump_json())
    return disturbed


@pytest.mark.parametrize("where", [pytest.param("local", marks=pytest.mark.slow), "s3"])
def test_of_two_drivers_started_at_once_one_proceeds_and_the_other_names_it(
    short_run: Disturbed, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        use_server(monkeypatch, server)
        short_run.store_url = f"s3://{server.new_bucket()}/twice"
    drivers = [short_run.start(), short_run.start()]
    codes = {driver.wait(240): driver.pid for driver in drivers}
    assert sorted(codes) == [0, 2], short_run.whole_log()
    assert f"run 'run' is driven by pid {codes[0]} on " in short_run.whole_log()
    assert "--takeover" in short_run.whole_log()
    assert {commit.epoch for commit in short_run.commits()} == {1}
    assert len(short_run.state_digests()) == 2


def test_a_driver_that_slept_through_a_takeover_commits_nothing_and_ends(short_run: Disturbed) -> None:
    sleeper = short_run.start()
    wait_for(lambda: _epochs(short_run) == {1}, 240)
    os.kill(sleeper.pid, signal.SIGSTOP)
    before = {commit.name for commit in short_run.commits()}
    successor = short_run.start(takeover=True)
    wait_for(lambda: 2 in _epochs(short_run), 240)
    os.kill(sleeper.pid, signal.SIGCONT)
    assert sleeper.wait(120) == 1
    assert f"was taken over by pid {successor.pid}" in short_run.whole_log()
    assert successor.wait(240) == 0, short_run.whole_log()
    assert {commit.name for commit in short_run.commits() if commit.epoch == 1} == before
    assert len(short_run.state_digests()) == 2


def _epochs(run: Disturbed) -> set[int]:
    if newest_lease(open_store(run.store_url), "run") is None:
        return set()
    return {commit.epoch for commit in run.commits()}
