"""A network that parts machines of a joined Ray cluster while the store is in reach of all: a driver from its engines,
for so long that Ray gives them up too, and one from the head."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from cairn.storage.ledger.commits import Step
from tests.chaos.faults import Fault, three_engines
from tests.chaos.oracle import differences, survivors
from tests.chaos.runs import Disturbed, Driver
from tests.far_machine import Far, cluster, why_not
from tests.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)

BORNE = 5.0
"""Seconds without a network that Ray does not take for the loss of a machine, with the options of that cluster."""

PLACES = ((1, Step.ROLLOUT), (2, Step.TRAIN), (3, Step.TRAIN))
EVENTS = [Fault(*place, moment, "event") for place in PLACES for moment in ("before", "during")]


WAITING = """
import sys, threading, time
import ray
from cairn.engines.fleet.calls import Deadline, result
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.cluster import draining
from cairn.engines.types.errors import ClusterLost

@ray.remote
def work():
    time.sleep(600)

joined = Cluster.open(sys.argv[1], num_cpus=0, object_store_memory=0, timeout=60)
working = work.remote()

def ask():
    while True:
        joined.answer(draining)
        time.sleep(0.1)

threading.Thread(target=ask, daemon=True).start()  # as a driver does
print("works", flush=True)
try:
    result(working, Deadline(600), "work()")
except ClusterLost as error:
    print(error, flush=True)
joined.close()
"""


def test_engines_out_of_reach_cost_time_and_those_that_ray_gives_up_are_made_again_when_their_machine_is_back(
    joined: Disturbed, undisturbed: Disturbed, tmp_path: Path
) -> None:
    run, engines = joined, []
    with cluster(tmp_path, here=0, far=8) as far:
        run.join(far.address)
        run.cluster = lost = far.join()
        driver = run.start(EVENTS)
        for events in (EVENTS[:2], EVENTS[2:4]):
            engines.append(part(run, driver, events, far))
            time.sleep(BORNE)
            far.host.mend()
        engines.append(part(run, driver, EVENTS[4:], far))
        wait_for(lambda: far.misses(lost))
        assert engines[0] == engines[1] == engines[2]
        assert survivors([*engines[2]], 0) == [*engines[2]]  # they work on, and nobody will ask them
        far.host.mend()
        assert survivors([lost, *engines[2]], 60) == []
        run.cluster = far.join()
        run.exits.append(driver.wait(400))
        assert run.exits == [0], run.log()
        assert differences(run, undisturbed) == []
    assert "\nEngine training is restarted: cairn:run-" in run.whole_log()
    assert "1 committed step(s) to replay" in run.whole_log()
    for place in PLACES:  # of a rollout's shards one may have ended before
        took = [commit.timings["run"] for commit in run.commits() if (commit.iteration, commit.step) == place]
        assert max(took) > BORNE


def test_a_driver_that_is_parted_from_the_head_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would have to be in the home folder
    with cluster(tmp_path, here=1, far=0) as far:
        far.join()
        words = far.machine.words(sys.executable, "-c", WAITING, far.address)
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as driver:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "works\n"
            far.host.cut()
            assert driver.stdout.readline().startswith(
                f"the head of the Ray cluster does not respond at {far.address} "
            )
            assert driver.wait(60) == 0


def part(run: Disturbed, driver: Driver, events: Sequence[Fault], far: Far) -> set[psutil.Process]:
    """Part the machines in the midst of a step, which cannot end before: the engines are stopped. Returns these."""
    engines: set[psutil.Process] = set()

    def stop_engines() -> None:
        engines.update(three_engines(run.cluster))
        for engine in engines:
            engine.suspend()

    begun, amid = events
    run.at_event(begun, driver, stop_engines)
    run.at_event(amid, driver, far.host.cut)
    for engine in engines:
        engine.resume()
    return engines
