"""Machines of a joined cluster lose their power under its engines: what was in flight is done again, on others."""

import time
from pathlib import Path

import psutil
import pytest

from cairn.storage.ledger.commits import Step
from tests.chaos.faults import ROLLOUT, TRAINING, Fault, engines_of
from tests.chaos.oracle import differences
from tests.chaos.report import recovered
from tests.chaos.runs import Disturbed
from tests.far_machine import cluster, why_not
from tests.machines import machine
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

WITHOUT = 30.0
"""Seconds without a machine for the trainer, after which Ray has noticed the loss."""

ROLLOUTS = Fault(1, Step.ROLLOUT, "halfway", "event")
STOPPED, TRAINER = Fault(2, Step.TRAIN, "before", "event"), Fault(2, Step.TRAIN, "during", "event")


def test_a_lost_machine_costs_what_was_in_flight_and_without_a_spare_the_time_until_another_one_joins(
    joined: Disturbed, undisturbed: Disturbed, tmp_path: Path
) -> None:
    run = joined
    with (
        cluster(tmp_path, here=0, far=2) as far,
        machine("trainer", tmp_path, far.host) as other,
        machine("spare", tmp_path, far.host) as spare,
        machine("late", tmp_path, far.host) as late,
    ):
        run.join(far.address)
        run.cluster = rollouts = far.join()
        training = far.join(other, 1)
        driver = run.start([ROLLOUTS, STOPPED, TRAINER])
        kept: set[psutil.Process] = set()

        def lose_rollouts() -> None:
            wait_for(lambda: titles(rollouts) == [ROLLOUT] * 2 and titles(training) == [TRAINING])
            kept.update(engines_of(training))
            run.cluster = far.join(spare, 2)
            far.machine.end()

        def stop_trainer() -> None:
            wait_for(lambda: {*engines_of(training)} == kept)  # it has kept its weights
            for engine in kept:
                engine.suspend()

        run.at_event(ROLLOUTS, driver, lose_rollouts)
        lost_at = time.time()
        run.at_event(STOPPED, driver, stop_trainer)
        rollouts_again = next_commit(run, lost_at) - lost_at
        run.at_event(TRAINER, driver, other.end)
        time.sleep(WITHOUT)
        assert driver.poll() is None, run.log()
        joined_at = time.time()
        trainer_raylet = far.join(late, 1)
        run.exits.append(driver.wait(400))
        assert run.exits == [0], run.log()
        training_again = next_commit(run, joined_at) - joined_at
        recovered("machine of the rollout engines, with a spare: from its loss to the next commit", rollouts_again)
        recovered("machine of the trainer, without one: from another one's start to the next commit", training_again)
        assert engines_of(trainer_raylet) == {}
        assert differences(run, undisturbed) == []
    assert {commit.epoch for commit in run.commits()} == {1}
    assert "\nEngine training is restarted: " in run.whole_log()


def titles(raylet: psutil.Process) -> list[str]:
    """Kinds of the engines on a machine; while Ray gives one another title it is not seen."""
    commands = engines_of(raylet).values()
    return sorted(kind for command in commands for kind in (ROLLOUT, TRAINING) if command[0].startswith(kind))


def next_commit(run: Disturbed, moment: float) -> float:
    """When the first commit after a moment was made, in Unix time."""
    return min(commit.committed_at for commit in run.commits() if commit.committed_at > moment)
