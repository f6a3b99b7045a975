"""Kills at random moments, from outside: also while a driver starts or ends, where no event says so.

A driver is started on a run; after a random time a random victim of it is struck, until the driver ends; then the next
one goes on, and once a run is complete the next run starts. Seed and victims are the same for the same seed; what the
processes were doing when they were struck is not.
"""

import random
import subprocess
import time
from collections.abc import Callable

import psutil

from tests.chaos.faults import Victim, bear_witness, processes, strike
from tests.chaos.runs import DEADLINE, Disturbed

VICTIMS: dict[Victim, float] = {"driver": 5, "training": 1, "rollout": 1, "ray": 1, "prefect": 1, "database": 1}
"""How often each is drawn, relatively; the store has faults of its own in the matrix."""

FAULTS_A_RUN = 6
"""After as many a run is left in peace to end."""

DRIVERS_A_RUN = 12
"""More than its faults can end: a run that needs more does not get anywhere."""


def random_kills(
    run: Disturbed, dice: random.Random, most: int, within: float, tell: Callable[[str], None]
) -> list[str]:
    """Strike a run up to `most` times until it is complete; returns what went otherwise than it should.

    `within`: seconds that pass at most before each; as many as a whole run takes reach all of it.
    """
    most = min(most, FAULTS_A_RUN)
    for _ in range(DRIVERS_A_RUN):
        own_prefect = dice.random() < 0.5
        driver = run.start(own_prefect=own_prefect)
        struck: list[Victim] = []
        try:
            end = time.monotonic() + DEADLINE
            while len(run.struck()) < most and _still_runs(driver, dice.uniform(0, within)):
                (victim,) = dice.choices(list(VICTIMS), list(VICTIMS.values()))
                if _strike(run, driver, victim):
                    struck.append(victim)
                    tell(f"{victim} killed")
            code = driver.wait(max(1, end - time.monotonic()))
        finally:
            driver.kill()
            driver.wait()
        run.exits.append(code)
        if left := run.left_behind():
            return [f"left behind by a driver after {struck}: {left}"]
        if code == 0:
            return []
        if not struck:
            return [f"a driver that nobody struck ended with {code}\n{run.log()}"]
        if "Traceback" in run.whole_log():
            return [f"a driver did not end with a sentence after {struck}\n{run.log()}"]
    return [f"not complete after {DRIVERS_A_RUN} drivers, which ended with {run.exits}"]


def _still_runs(driver: "subprocess.Popen[bytes]", seconds: float) -> bool:
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _strike(run: Disturbed, driver: "subprocess.Popen[bytes]", victim: Victim) -> bool:
    """Whether there was such a victim."""
    try:
        victims = processes(psutil.Process(driver.pid), victim)
    except psutil.NoSuchProcess:
        return False
    if victims:
        bear_witness(run.witness, victims, victim=victim)
        strike(victim, victims, run.prefect_home)
    return bool(victims)
