"""A Ray cluster of two machines: its head here, and one whose cable can be cut (tests/network.py, machines.py)."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests import machines, network
from tests.machines import Machine, machine
from tests.network import Host, host
from tests.ray_fixtures import ray_head
from tests.redis_server import Redis
from tests.waiting import wait_for

OPTIONS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 4,
    "raylet_start_wait_time_s": 120,
}
"""A machine is missed after some 15 seconds, by default after a minute; and a busy one has time to start."""


def why_not() -> str | None:
    """Why there can be no such cluster; None where there can."""
    return network.why_not() or machines.why_not()


@dataclass
class Far:
    """The machine at the other end of the cable, a node of the cluster whose head is here."""

    machine: Machine
    host: Host
    here: int
    """CPUs of the head's machine."""
    cpus: int
    log: Path
    """Of what starts Ray there."""
    redis: Redis | None
    """Where the head has its state; None for its memory."""
    _heads: ExitStack
    address: str = field(init=False)
    """Of the head."""
    head: psutil.Process = field(init=False)
    """Its raylet."""

    def start_head(self, port: int = 0) -> None:
        """Start the head, on a port that is free unless one is given; one that comes back takes up its state in Redis,
        if it has one."""
        options = [f"--node-ip-address={self.host.here}", f"--num-cpus={self.here}", f"--port={port}"]
        options += [f"--system-config={json.dumps(OPTIONS)}", *(self.redis.options if self.redis else [])]
        environment = self.redis.environment if self.redis else {}
        self.address = self._heads.enter_context(ray_head(*options, environment=environment))
        raylets = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
        (self.head,) = [raylet for raylet in raylets if option(raylet, "--node_ip_address") == self.host.here]

    def lose_head(self) -> None:
        """Kill all of it at once."""
        start = self.head.parent()
        assert start is not None
        for process in (start, *start.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def join(self, at: Machine | None = None, cpus: int | None = None) -> psutil.Process:
        """Start Ray there, as an operator does when it is gone, or on another machine of that host, with so many CPUs.
        Return its raylet."""
        at, cpus = at or self.machine, self.cpus if cpus is None else cpus
        for process in at.processes():
            with suppress(psutil.NoSuchProcess):
                if "start" in process.cmdline():
                    process.kill()
        command = f"start --block --address={self.address} --node-ip-address={self.host.there} --num-cpus={cpus}"
        ray = Path(sys.executable).parent / "ray"
        options = ["--object-store-memory=200000000", f"--temp-dir={machines.TEMPORARY}"]
        words = at.words(str(ray), *command.split(), *options)
        while not self._starts(words):  # on a busy machine Ray gives up after 30 seconds
            pass
        (raylet,) = [process for process in at.processes() if process.name() == "raylet"]
        return raylet

    def _starts(self, words: list[str]) -> bool:
        with self.log.open("w") as log:
            started = subprocess.Popen(words, stdout=log)
        wait_for(lambda: "Ray runtime started" in self.log.read_text() or started.poll() is not None)
        return started.poll() is None

    def misses(self, raylet: psutil.Process) -> bool:
        """Whether the head has noticed that a machine is out of reach."""
        log = Path(option(self.head, "--log_dir"), "gcs_server.out").read_text()
        return any("Node is dead" in line and option(raylet, "--node_id") in line for line in log.splitlines())


def option(process: psutil.Process, name: str) -> str:
    """Of a command line."""
    return next(word.partition("=")[2] for word in process.cmdline() if word.startswith(f"{name}="))


@contextmanager
def cluster(folder: Path, here: int, far: int, redis: Redis | None = None) -> Iterator[Far]:
    """A head here, with its state in Redis if one is given, and a machine elsewhere, with so many CPUs."""
    with host() as other, machine("far", folder, other) as there, ExitStack() as heads:
        made = Far(there, other, here, far, folder / "far.log", redis, heads)
        made.start_head()
        yield made
