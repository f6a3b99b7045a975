"""Drivers on machines of their own, with boots, processes and clocks of their own: one of them owns a run.

Machines are those of tests/machines.py; a clock is libfaketime's, set while it runs.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.debian import unpacked
from tests.faulty_s3 import faulty_proxy
from tests.machines import alone, why_not
from tests.s3 import S3Server, use_server
from tests.volatile_disk import ROOT

TIME_TO_LIVE = 6.0

pytestmark = pytest.mark.slow

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


class Driver:
    """A process that wants the lease of run `run`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.status = process.stdout.readline().strip()  # type: ignore[union-attr]

    def check(self) -> str:
        self.process.stdin.write("?\n")  # type: ignore[union-attr]
        self.process.stdin.flush()  # type: ignore[union-attr]
        return self.process.stdout.readline().strip()  # type: ignore[union-attr]


class Machines:
    """Starts drivers of one store, each where it is told to."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack
        self.store_url = str(folder / "store")

    def driver(self, machine: str | None = None, clock: Path | None = None) -> Driver:
        """On this machine, or on one of another name; with a clock that a file sets."""
        command = [
            sys.executable,
            "-m",
            "tests.chaos.events.holder",
            str(self.folder / "store"),
            "run",
            str(TIME_TO_LIVE),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if clock is not None:
            environment |= fake_clock(clock)
        if machine is not None:
            command = [*alone(machine, self.folder), *command]
        process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._stack.enter_context(ended(process))
        return Driver(process)


@contextmanager
def ended(process: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


def fake_clock(setting: Path) -> dict[str, str]:
    """Environment of a process whose wall clock is off by what the file says, such as `+3600`."""
    root = unpacked(["libfaketime"], ROOT / "build" / "faketime")
    library = next(root.rglob("libfaketimeMT.so.1"))
    setting.write_text("+0")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(setting),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.parametrize("where", [None, "other"])
@pytest.mark.parametrize("step", ["+3600", "-3600"])
def test_a_clock_that_is_set_neither_ends_a_live_driver_nor_keeps_a_dead_one(
    machines: Machines, where: str | None, step: str
) -> None:
    clock = machines.folder / "clock"
    first = machines.driver(where, clock)
    assert first.status == "holds epoch 1"
    clock.write_text(step)
    assert first.check() == "holds it"
    assert machines.driver().status.startswith("refused: run 'run' is driven by pid ")
    assert first.check() == "holds it"
    first.process.kill()
    first.process.wait(30)
    clock.write_text("+0")
    began = time.monotonic()
    assert machines.driver().status == "holds epoch 2"
    waited = time.monotonic() - began
    assert (waited >= TIME_TO_LIVE) == (where is not None)  # here its process is known to be gone


@pytest.mark.proof
def test_of_two_machines_with_processes_of_one_number_one_owns_the_run(machines: Machines) -> None:
    first = machines.driver("one")
    assert first.status == "holds epoch 1"
    second = machines.driver("two")
    # Both say that they are the same process: it is the boot and the namespace that tell them apart.
    assert second.status.startswith("refused: run 'run' is driven by pid 1 on ")
    assert first.check() == "holds it"
    first.process.kill()
    first.process.wait(30)
    successor = machines.driver("two")
    assert successor.status == "holds epoch 2"
    assert successor.check() == "holds it"


def test_a_machine_that_slept_finds_that_it_was_succeeded(machines: Machines) -> None:
    sleeper = machines.driver("one")
    children = subprocess.run(["pgrep", "-P", str(sleeper.process.pid)], capture_output=True, text=True, check=True)
    (inside,) = map(int, children.stdout.split())
    os.kill(inside, 19)
    successor = machines.driver("two")
    assert successor.status == "holds epoch 2"
    os.kill(inside, 18)
    assert "was taken over by" in sleeper.check()
    assert successor.check() == "holds it"


def test_a_slow_store_costs_no_driver_its_run_whose_signs_of_life_come_in_time(
    machines: Machines, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal is two requests: of 1 s each it comes within the time to live of 6 s."""
    use_server(monkeypatch, s3_server)
    machines.store_url = f"s3://{s3_server.new_bucket()}/slow"
    with faulty_proxy(s3_server.endpoint) as proxy:
        with monkeypatch.context() as slow:
            slow.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            first = machines.driver("one")
        assert first.status == "holds epoch 1"
        proxy.latency = 1.0
        assert machines.driver("two").status.startswith("refused: run 'run' is driven by pid 1 on ")
        assert first.check() == "holds it"
