"""Two whole drivers of one run on machines of their own: one at a time has it, whatever happens to its machine."""

import subprocess
from pathlib import Path

import pytest

from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.leases import newest_lease
from cairn.storage.opening import open_store
from tests.chaos.faults import Fault
from tests.chaos.oracle import differences
from tests.chaos.runs import Disturbed
from tests.machines import machine, why_not
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

ASLEEP, LOST = Fault(1, Step.TRAIN, "during", "event"), Fault(2, Step.ROLLOUT, "during", "event")


def test_a_run_passes_from_machine_to_machine_as_they_fall_asleep_and_die(
    disturbed: Disturbed, undisturbed: Disturbed, tmp_path: Path
) -> None:
    run = disturbed
    with machine("one", tmp_path) as one, machine("two", tmp_path) as two:
        first = run.start([ASLEEP], on=one)
        wait_for(lambda: _epoch(run) == 1)
        assert _wait(run.start(on=two), run) == 2, run.log()
        assert "run 'run' is driven by pid " in run.log()
        assert " on one since " in run.log()

        run.at_event(ASLEEP, first, one.sleep)
        before = {commit.name: commit.digest for commit in run.commits()}
        second = run.start([LOST], on=two)

        def wake_the_first_and_lose_the_second() -> None:
            assert _epoch(run) == 2
            one.wake()
            assert _wait(first, run) == 1, run.whole_log()
            assert "run 'run' was taken over by pid " in run.whole_log()
            assert " on two since " in run.whole_log()
            two.end()

        run.at_event(LOST, second, wake_the_first_and_lose_the_second)
        second.wait(60)
        assert {commit.name: commit.digest for commit in run.commits() if commit.epoch == 1} == before
        assert _wait(run.start(on=one), run) == 0, run.log()
    assert {commit.epoch for commit in run.commits()} == {1, 2, 3}
    assert differences(run, undisturbed) == []


def _epoch(run: Disturbed) -> int | None:
    newest = newest_lease(open_store(run.store_url), run.name)
    return None if newest is None else newest.epoch


def _wait(driver: "subprocess.Popen[bytes]", run: Disturbed) -> int:
    run.exits.append(driver.wait(400))
    return run.exits[-1]
