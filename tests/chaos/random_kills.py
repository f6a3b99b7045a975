"""Kills at random moments, from outside: also while a driver starts, restores or ends, where no event says so.

A driver is started on a run; after a random time a random victim of it is struck, until the driver ends; then the next
one goes on, and once a run is complete the next run starts. Seed and victims are the same for the same seed; what the
processes were doing when they were struck is not.

What a kill costs is mostly imports. So drivers are forked from a process that has made them, runs have many kills each,
and where neither is the subject they share one Prefect server, and a Ray cluster whose engines outlive their driver:
`FAMILIES` says who is struck where.
"""

import json
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from tests.chaos.commands import COMMANDS, give
from tests.chaos.faults import FAILED, OUTAGE, AnyVictim, bear_witness, outages_met, processes, strike
from tests.chaos.oracle import survivors
from tests.chaos.runs import Disturbed, Driver
from tests.faulty_s3 import control

DEADLINE = 1200.0
"""Seconds that one driver may take to end, with all that is struck meanwhile."""

DRIVERS_A_RUN = 40
"""More than its faults can end: a run that needs more does not get anywhere."""


@dataclass(frozen=True)
class Family:
    """Runs of one kind."""

    configuration: str
    victims: Mapping[AnyVictim, float]
    """How often each is drawn, relatively; who is there for part of a run only has to be drawn more often."""
    faults: int
    """After as many a run is left in peace to end."""
    weight: float
    """How often such a run is drawn, relatively."""
    pace: float = 8
    """Faults in the time that an undisturbed run takes, or more."""
    own_prefect: bool = False
    """Whether its drivers start a Prefect server each."""
    on_s3: bool = False
    """Whether its ledger is in an S3 store, behind a proxy that can be away."""
    seconds: float = 60
    """What an undisturbed run takes, where there is none to look at."""


FAMILIES: Mapping[str, Family] = {
    "joined": Family(
        "long",
        {"driver": 8, "grader": 4, "training": 0.7, "rollout": 0.7, "gc": 0.7, "fork": 0.7, "delete": 0.7},
        faults=60,
        weight=3,
        pace=12,
    ),
    "streaming": Family(
        "joined-streaming",
        {"driver": 6, "grader": 3, "rollout": 1.5, "training": 0.7, "gc": 0.7, "delete": 0.7},
        faults=16,
        weight=2,
        seconds=12,
    ),
    "prefect": Family(
        "long", {"prefect": 2, "database": 2, "driver": 1, "grader": 1}, faults=8, weight=4, own_prefect=True
    ),
    "head": Family("short", {"ray": 3, "driver": 1, "grader": 1}, faults=5, weight=4),
    "store": Family("short", {"store": 6, "driver": 1, "training": 1}, faults=8, weight=2, on_s3=True),
    "ranks": Family("tensor", {"rank": 12, "training": 4, "driver": 1}, faults=6, weight=4),
    "sglang": Family(
        "sglang", {"server": 1, "scheduler": 6, "stopped": 0.5, "router": 2, "driver": 0.5}, faults=12, weight=4, pace=2
    ),
}


def random_kills(
    run: Disturbed, family: Family, dice: random.Random, most: int, within: float, tell: Callable[[str], None]
) -> list[str]:
    """Strike a run up to `most` times until it is complete; returns what went otherwise than it should.

    `within`: seconds that pass at most before each.
    """
    most = min(most, family.faults)
    for _ in range(DRIVERS_A_RUN):
        driver = run.start(own_prefect=family.own_prefect)
        struck: list[AnyVictim] = []
        findings: list[str] = []
        try:
            end = time.monotonic() + DEADLINE
            while len(run.struck()) < most and not findings and _still_runs(driver, dice.uniform(0, within)):
                (victim,) = dice.choices(list(family.victims), list(family.victims.values()))
                before = len(run.struck())
                findings = _strike(run, driver, victim)
                if len(run.struck()) > before:
                    struck.append(victim)
                    tell(f"{victim} struck")
            code = driver.wait(max(1, end - time.monotonic()))
        finally:
            driver.kill()
            driver.wait()
        run.exits.append(code)
        if findings:
            return findings
        if left := run.left_behind(engines=code == 0):
            return [f"left behind by a driver after {struck}: {left}"]
        if code == 0:
            return []
        if not struck:
            return [f"a driver that nobody struck ended with {code}\n{run.log()}"]
        if run.broke():
            return [f"a driver did not end with a sentence after {struck}\n{run.log()}"]
    return [f"not complete after {DRIVERS_A_RUN} drivers, which ended with {run.exits}"]


def _still_runs(driver: Driver, seconds: float) -> bool:
    try:
        driver.wait(seconds)
    except subprocess.TimeoutExpired:
        return True
    return False


def _strike(run: Disturbed, driver: Driver, victim: AnyVictim) -> list[str]:
    """Strike the victim if there is one; returns what went otherwise than it should."""
    if victim in COMMANDS:
        return _give(run, victim)
    if victim == "store":
        _take_away_store(run)
        return []
    try:
        victims = processes(psutil.Process(driver.pid), victim, run.cluster)
    except psutil.NoSuchProcess:
        return []
    if victims:
        bear_witness(run.witness, victims, victim=victim)
        strike(victim, victims, run.prefect_home)
        if victim == "driver":
            driver.wait(60)
        # One that is stopped while it starts is missed when its start is overdue, and must be gone with its driver.
        if victim != "stopped" and (alive := survivors(victims)):
            return [f"{victim} was struck and lives: {alive}"]
    return []


def _take_away_store(run: Disturbed) -> None:
    """For a while; it counts if a request met that."""
    endpoint = run.environment["AWS_ENDPOINT_URL"]
    at, met = time.time(), outages_met(endpoint)
    control(endpoint, outage=OUTAGE)
    time.sleep(OUTAGE)
    if (now := outages_met(endpoint)) > met:
        with run.witness.open("a") as witness:
            witness.write(json.dumps({"victim": "store", "requests": now - met, "pids": [], "at": at}) + "\n")


def _give(run: Disturbed, command: AnyVictim) -> list[str]:
    assert command in COMMANDS
    try:
        came = give(command, run.store_url, "run")
    except FileNotFoundError:  # no run yet
        return []
    except Exception as error:
        came = f"{FAILED} {type(error).__name__}: {error}"
    bear_witness(run.witness, [], victim=command, came=came)
    return [f"{command}: {came}"] if came.startswith(FAILED) else []
