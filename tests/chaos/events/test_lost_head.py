"""The head of a joined Ray cluster dies under a driver: a new driver has the run on the cluster that comes after it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.storage.ledger.commits import Step
from tests.chaos.faults import Fault, engines_of
from tests.chaos.oracle import differences, survivors
from tests.chaos.runs import ROOT, Disturbed
from tests.far_machine import cluster, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

CAIRN = Path(sys.executable).with_name("cairn")

LOST = Fault(2, Step.TRAIN, "during", "event")


def test_a_new_driver_goes_on_after_the_head_on_the_cluster_that_comes_next(
    joined: Disturbed, undisturbed: Disturbed, tmp_path: Path
) -> None:
    run = joined
    with cluster(tmp_path, here=0, far=8) as far:
        # A store may name the cluster of this machine and code on this path.
        own = {"RAY_ADDRESS": far.address, "PYTHONPATH": f"{ROOT}:{os.environ['PYTHONPATH']}"}
        run.environment = {**run.environment, **own}
        run.join("auto")
        run.cluster = lost = far.join()
        driver = run.start([LOST])
        run.at_event(LOST, driver, far.lose_head)
        engines = engines_of(lost)
        run.exits.append(driver.wait(120))
        assert run.exits == [1], run.log()
        sentence = f"the Ray cluster at {far.address} is out of reach: its raylet on this machine died; "
        assert sentence in run.log().splitlines()[-1]
        before = {commit.name: commit.digest for commit in run.commits()}

        lost.kill()  # as whoever starts another head does; by itself it would look for the old one for a minute
        assert survivors([lost, *engines], 60) == []
        far.start_head(int(far.address.rpartition(":")[2]))
        run.cluster = far.join()
        resumed = subprocess.run(
            [CAIRN, "resume", run.name, "--store", run.store_url],
            cwd=run.folder,
            env=run.whole_environment(),
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert resumed.returncode == 0, resumed.stderr
        assert {commit.name: commit.digest for commit in run.commits() if commit.epoch == 1} == before
        assert {commit.epoch for commit in run.commits()} == {1, 2}
        assert differences(run, undisturbed) == []
