"""SIGKILL during and between every step: the run ends as if nothing had happened.

Each row of DRIVER_KILLS is one driver, killed where it says; the next row's driver goes on with the same run. The
faults of ACTOR_KILLS strike under one driver, which has to mend them itself.
"""

import signal
from collections import Counter

import pytest

from storage.commits import Step
from tests.chaos.conftest import ITERATIONS, Disturbed
from tests.chaos.faults import Fault

DRIVER_KILLS = [
    Fault(0, Step.EVAL, "during"),
    Fault(0, Step.ROLLOUT, "during"),
    Fault(0, Step.TRAIN, "uncommitted"),
    Fault(1, Step.REWARD, "uncommitted"),
    Fault(1, Step.FILTER, "before"),
    Fault(1, Step.SCORE, "after"),
    Fault(1, Step.TRAIN, "during"),
    Fault(1, Step.CHECKPOINT, "uncommitted"),
    Fault(2, Step.ADVANTAGE, "during"),
    Fault(2, Step.SYNC, "before"),
    Fault(3, Step.ROLLOUT, "after"),
]

ACTOR_KILLS = [
    Fault(0, Step.ROLLOUT, "during", "rollout"),
    Fault(0, Step.TRAIN, "before", "training"),
    Fault(1, Step.EVAL, "before", "rollout"),
    Fault(1, Step.TRAIN, "during", "training"),
    Fault(1, Step.SYNC, "before", "rollout"),
    Fault(2, Step.SCORE, "during", "training"),
    Fault(2, Step.TRAIN, "uncommitted", "training"),
    Fault(3, Step.CHECKPOINT, "before", "training"),
]


@pytest.mark.timeout(900)
def test_a_driver_killed_at_every_step_ends_in_the_undisturbed_state(
    disturbed: Disturbed, undisturbed: Disturbed
) -> None:
    for count, fault in enumerate(DRIVER_KILLS, start=1):
        assert disturbed.drive([fault]) == -signal.SIGKILL, f"{fault} did not happen\n{disturbed.log()}"
        assert len(disturbed.struck()) == count
    assert disturbed.drive() == 0, disturbed.log()
    assert_same_end(disturbed, undisturbed)


@pytest.mark.timeout(600)
def test_killed_actors_are_replaced_and_the_run_ends_in_the_undisturbed_state(
    disturbed: Disturbed, undisturbed: Disturbed
) -> None:
    assert disturbed.drive(ACTOR_KILLS) == 0, disturbed.log()
    struck = disturbed.struck()
    assert len(struck) == len(ACTOR_KILLS)
    assert all(account["pids"] for account in struck)
    assert_same_end(disturbed, undisturbed)


def assert_same_end(disturbed: Disturbed, undisturbed: Disturbed) -> None:
    """Equal state after every train step, and every step committed once, with the same snapshots where it counts."""
    assert disturbed.state_digests() == undisturbed.state_digests()
    assert len(undisturbed.state_digests()) == ITERATIONS
    names = Counter(commit.name for commit in disturbed.commits())
    assert set(names.values()) == {1}
    assert set(names) == {commit.name for commit in undisturbed.commits()}
