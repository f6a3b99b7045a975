"""The head of a joined Ray cluster, whose state is in Redis, dies and comes back: the run waits for it and goes on with
the same engines, and so does the next driver where the driver's machine was the head's."""

import time
from pathlib import Path

import psutil
import pytest

from cairn.engines.fleet.cluster import RECONNECT_TIMEOUT, USUAL_RECONNECT_TIMEOUT
from cairn.storage.ledger.commits import Step
from tests import redis_server
from tests.chaos.faults import ROLLOUT, Fault, engines_of, three_engines
from tests.chaos.oracle import differences, survivors
from tests.chaos.report import recovered
from tests.chaos.runs import Disturbed
from tests.far_machine import Far, cluster, why_not
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

if reason := why_not() or redis_server.why_not():
    pytest.skip(reason, allow_module_level=True)

AWAY = USUAL_RECONNECT_TIMEOUT + 15.0
"""Seconds: longer than any process of Ray lives without its head by default."""

HEAD, ENGINE = Fault(1, Step.ROLLOUT, "during", "event"), Fault(1, Step.TRAIN, "during", "event")
IDLE, BOTH = Fault(2, Step.TRAIN, "before", "event"), Fault(2, Step.TRAIN, "during", "event")
NEXT = Fault(3, Step.ROLLOUT, "before", "event")


def test_a_run_goes_on_without_its_head_and_waits_for_it_where_an_engine_must_be_made_again(
    joined: Disturbed, undisturbed: Disturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = joined
    monkeypatch.setenv(RECONNECT_TIMEOUT, "600")
    with (
        redis_server.redis_server(tmp_path) as redis,
        cluster(tmp_path, here=0, far=8, redis=redis) as far,
    ):
        run.join(far.address)
        run.cluster = raylet = far.join()
        driver = run.start([HEAD, ENGINE, NEXT], own_prefect=True, on=far.machine)
        run.at_event(HEAD, driver, far.lose_head)
        lost_at = time.monotonic()
        before, victims = three_engines(raylet), set[psutil.Process]()

        def lose_engine() -> None:
            victims.add(wait_for(lambda: rollout_engine(raylet)))
            for victim in victims:
                victim.kill()

        run.at_event(ENGINE, driver, lose_engine)
        wait_for(lambda: time.monotonic() - lost_at > AWAY)
        assert driver.poll() is None, run.log()
        without = [(commit.iteration, commit.step) for commit in run.commits()]
        assert (1, Step.TRAIN) in without  # calls to engines need no head
        assert "The head of the Ray cluster does not respond at " in run.whole_log()
        start_head_again(far)
        back_at = time.monotonic()
        wait_for(lambda: len(run.commits()) > len(without) or driver.poll() is not None)
        recovered(
            "head, and an engine meanwhile: from the head's return to the next commit", time.monotonic() - back_at
        )
        others, kept = [*(before - victims)], list[psutil.Process]()
        run.at_event(NEXT, driver, lambda: kept.extend(survivors(others, 0)))
        assert kept == others
        run.exits.append(driver.wait(400))
        assert run.exits == [0], run.log()
        assert {commit.epoch for commit in run.commits()} == {1}
        assert differences(run, undisturbed) == []
    assert "The head of the Ray cluster responds again, after " in run.whole_log()


def test_a_driver_that_is_lost_with_its_head_leaves_its_engines_to_the_next_one(
    joined: Disturbed, undisturbed: Disturbed, tmp_path: Path
) -> None:
    run = joined
    with (
        redis_server.redis_server(tmp_path) as redis,
        cluster(tmp_path, here=0, far=8, redis=redis) as far,
    ):
        run.environment = {**run.environment, "RAY_ADDRESS": far.address}
        run.join("auto")  # by the head's raylet
        run.cluster = raylet = far.join()
        driver, engines = run.start([IDLE, BOTH]), list[psutil.Process]()
        run.at_event(IDLE, driver, lambda: engines.extend(three_engines(raylet)))
        run.at_event(BOTH, driver, far.lose_head)
        run.exits.append(driver.wait(120))
        assert run.exits == [1], run.log()
        start_head_again(far)
        back_at = time.monotonic()
        commits = len(run.commits())
        driver = run.start([NEXT])
        wait_for(lambda: len(run.commits()) > commits or driver.poll() is not None)
        recovered("head with the driver: from the next driver's start to the next commit", time.monotonic() - back_at)
        kept = list[psutil.Process]()
        run.at_event(NEXT, driver, lambda: kept.extend(survivors(engines, 0)))
        assert kept == engines
        run.exits.append(driver.wait(400))
        assert run.exits == [1, 0], run.log()
        assert {commit.epoch for commit in run.commits()} == {1, 2}
        assert differences(run, undisturbed) == []
    assert "to replay" not in run.whole_log()


def rollout_engine(raylet: psutil.Process) -> psutil.Process | None:
    """One of a run."""
    return next((engine for engine, command in engines_of(raylet).items() if command[0].startswith(ROLLOUT)), None)


def start_head_again(far: Far) -> None:
    """Start the head where it was, as its supervisor does."""
    far.start_head(int(far.address.rpartition(":")[2]))
