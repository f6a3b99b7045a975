"""A training rank that stops amid an update: the collective ends, and the run ends as if nothing had happened."""

import pytest

from tests.chaos.matrix import Plan, execute
from tests.chaos.oracle import differences, seconds_to_recover
from tests.chaos.plans import HUNG
from tests.chaos.report import recovered
from tests.chaos.services import Services
from tests.shared_memory import watched_segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SECONDS = 60.0
"""`training.distributed_timeout_minutes` of these configurations."""

RESTART = 180.0
"""Seconds that the restart and the replay may take on a busy machine."""


@pytest.mark.parametrize("plan", HUNG, ids=lambda plan: plan.name)
def test_a_hung_rank_costs_the_time_of_a_collective_and_a_restart(services: Services, plan: Plan) -> None:
    undisturbed = services.undisturbed(plan.configuration).run
    with watched_segments() as left_segments:
        run = services.run(plan.name, plan.configuration)
        try:
            assert execute(plan, run) == []
            (recovery,) = seconds_to_recover(run)
            assert recovery is not None
            assert SECONDS - 10 < recovery < SECONDS + RESTART
            assert "Engine training is restarted: " in run.whole_log()
            assert differences(run, undisturbed, left_segments) == []
            recovered(f"{plan.name}: from the stop of a rank to the next commit", recovery)
        finally:
            run.kill_what_is_left()
