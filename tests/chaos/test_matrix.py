"""Whatever is struck, whenever, the run ends as if nothing had happened: a set with every step, moment and victim.

`make chaos` executes the whole matrix, and random kills after it.
"""

from typing import get_args

import pytest

from tests.chaos.commands import COMMANDS
from tests.chaos.configurations import CONFIGURATIONS
from tests.chaos.faults import FurtherVictim
from tests.chaos.in_process import drive_whole
from tests.chaos.matrix import CI_SET, MOMENTS, STEPS, VICTIMS, every_case, execute
from tests.chaos.oracle import differences
from tests.chaos.plans import JOINED_PARTIAL, LAGGED, STREAMING, whole
from tests.chaos.runs import Disturbed
from tests.chaos.services import Services
from tests.faulty_s3 import proxy_process
from tests.s3 import S3Server
from tests.shared_memory import watched_segments


def test_the_quick_set_has_every_step_every_moment_and_every_victim() -> None:
    assert {fault.step for fault in CI_SET.faults} == set(STEPS)
    assert {fault.moment for fault in CI_SET.faults} == set(MOMENTS)
    assert {fault.victim for fault in CI_SET.faults} == set(VICTIMS)


def test_the_whole_matrix_has_every_case_once() -> None:
    cases = [(fault.step, fault.moment, fault.victim) for plan in every_case() for fault in plan.faults]
    assert len(set(cases)) == len(cases) == len(STEPS) * len(MOMENTS) * len(VICTIMS)


def test_every_configuration_and_every_victim_is_in_the_matrix() -> None:
    plans = whole()
    struck = {fault.victim for plan in plans for fault in plan.faults}
    assert struck == {*VICTIMS, *get_args(get_args(FurtherVictim)[0]), *COMMANDS}
    assert set(CONFIGURATIONS) - {"short", "long"} == {plan.configuration for plan in plans}
    assert len({plan.name for plan in plans}) == len(plans)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_run_struck_everywhere_ends_in_the_undisturbed_state(
    disturbed: Disturbed, undisturbed: Disturbed, s3_server: S3Server
) -> None:
    disturbed.warm = True
    with proxy_process(s3_server.endpoint) as proxy:
        disturbed.store_url = f"s3://{s3_server.new_bucket()}/chaos"
        disturbed.environment = {**disturbed.environment, **s3_server.env, "AWS_ENDPOINT_URL": proxy.endpoint}
        assert execute(CI_SET, disturbed) == []
        assert proxy.control()["outage"] > 0
        with pytest.MonkeyPatch.context() as patch:
            for name, value in s3_server.env.items():
                patch.setenv(name, value)
            assert differences(disturbed, undisturbed) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_engines_that_outlive_their_drivers_and_unfinished_groups_lose_nothing(services: Services) -> None:
    services.warm = True
    with watched_segments() as left_segments:
        run = services.run(JOINED_PARTIAL.name, JOINED_PARTIAL.configuration)
        try:
            assert execute(JOINED_PARTIAL, run) == []
            assert differences(run, None, left_segments) == []
        finally:
            run.kill_what_is_left()


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_run_whose_halves_lie_side_by_side_may_be_killed_in_either(services: Services) -> None:
    services.warm = True
    undisturbed = services.run("undisturbed-lagged", LAGGED.configuration)
    drive_whole(undisturbed)
    with watched_segments() as left_segments:
        run = services.run(LAGGED.name, LAGGED.configuration)
        try:
            assert execute(LAGGED, run) == []
            saved = "committed in one of the two alone: ['000002/checkpoint']"
            # By the driver that got notice, unless that came before it learned from iteration 2.
            assert set(differences(run, undisturbed, left_segments)) <= {saved}
        finally:
            run.kill_what_is_left()


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_a_run_that_streams_loses_nothing_and_trains_on_what_was_decided_once(services: Services) -> None:
    services.warm = True
    with watched_segments() as left_segments:
        run = services.run(STREAMING.name, STREAMING.configuration)
        try:
            assert execute(STREAMING, run) == []
            resting = [account["resting"] for account in run.struck() if account["moment"] == "updating"]
            assert all(resting), "an update was not in flight"
            assert differences(run, None, left_segments) == []
        finally:
            run.kill_what_is_left()
