"""CPU time of a durable iteration: by process and, where py-spy is installed, by function.

    python -m bench.cpu [RECIPE] [--set a.b=c] [--iterations 40] [--stacks FOLDER] [--smoke] [--json FILE]

A run is started as a user starts it. The CPU time of its processes is read after its second iteration, when all imports
are complete, and after its last. Other processes of the machine are ignored.

With `--stacks` py-spy (`pip install py-spy`) samples the stacks of driver and engines meanwhile, which takes some of
their time. It writes one file for each process into the folder, for speedscope or flamegraph.pl. Cairn's functions in
the driver's stacks are printed, as shares of its CPU time.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import CAIRN, DEADLINE, RUN
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store

FIRST = 1
"""Iteration after which time counts."""
ROOMS = ("flows/", "tasks/", "engines/", "storage/")
MOST = 25
"""Number of functions that are printed."""
DRIVER = "driver"
SAMPLED = (DRIVER, "rollout engine", "training engine")
"""Processes whose stacks are sampled."""


def role(process: psutil.Process, driver: int) -> str:
    """Return the role of a process of a run."""
    command = " ".join(process.cmdline())
    if process.pid == driver:
        return DRIVER
    if "server_process" in command:
        return "Prefect's server"
    if command.startswith(("ray::Train", "ray::train")):
        return "training engine"
    if command.startswith(("ray::Rollout", "ray::generate")):
        return "rollout engine"
    return "Ray" if "ray" in command else "graders and others"


class Processes:
    """Processes of a run. The name of an engine's process changes with its current call, so a recognized role is
    retained."""

    def __init__(self, driver: int) -> None:
        self._driver = psutil.Process(driver)
        self.roles: dict[int, str] = {}

    def look(self) -> dict[int, float]:
        """Return the CPU seconds of each process so far."""
        found = {}
        with suppress(psutil.NoSuchProcess):
            for process in [self._driver, *self._driver.children(recursive=True)]:
                with suppress(psutil.Error):
                    if self.roles.get(process.pid) not in SAMPLED:
                        self.roles[process.pid] = role(process, self._driver.pid)
                    times = process.cpu_times()
                    found[process.pid] = times.user + times.system
        return found


def wait_for(iteration: int, store: str, run: subprocess.Popen[bytes], processes: Processes) -> dict[int, float]:
    """Wait until the weights of an iteration are published; return the CPU seconds of all processes at that time."""
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end and run.poll() is None:
        found = processes.look()
        with suppress(FileNotFoundError):
            if Ledger.open(open_store(store), RUN).find(iteration, Step.SYNC) is not None:
                return found
        time.sleep(0.2)
    raise SystemExit(f"iteration {iteration} was not complete, the run ended with {run.poll()}")


def functions(stacks: Path) -> list[tuple[str, float]]:
    """Return Cairn's functions on a process's stacks, anywhere in the call chain, with the share of its time."""
    counts: Counter[str] = Counter()
    total = 0
    for line in stacks.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        total += int(count)
        for name in _cairn_functions(stack.split(";")):
            counts[name] += int(count)
    return [(name, count / total) for name, count in counts.most_common(MOST)]


def _cairn_functions(frames: Sequence[str]) -> set[str]:
    """Return Cairn's functions of a stack without line numbers, since a function may appear with several lines."""
    return {f"{frame.rpartition(':')[0]})" for frame in frames if frame.rpartition(" (")[2].startswith(ROOMS)}


def measure(recipe: str, options: Sequence[str], iterations: int, stacks: Path | None) -> dict[str, float]:
    """Return CPU seconds an iteration by role of the process, and wall-clock seconds."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        words = [word for option in options for word in ("--set", option)]
        run = subprocess.Popen(
            [CAIRN, "train", recipe, "--run", RUN, "--store", store, *words], stdout=subprocess.DEVNULL
        )
        processes, spies = Processes(run.pid), []
        try:
            before, began = wait_for(FIRST, store, run, processes), time.perf_counter()
            sampled = [(pid, name) for pid, name in processes.roles.items() if name in SAMPLED]
            spies = [_spy(pid, name, stacks) for pid, name in sampled] if stacks is not None else []
            after, seconds = wait_for(iterations - 1, store, run, processes), time.perf_counter() - began
            for spy in spies:
                spy.send_signal(signal.SIGINT)
            if any(spy.wait(DEADLINE) for spy in spies):
                raise SystemExit("py-spy could not sample: may it look at other processes here (ptrace)?")
            run.wait(DEADLINE)
        finally:
            for process in [*spies, run]:
                process.terminate()
    spent: dict[str, float] = {}
    for pid, cpu in after.items():
        name = processes.roles[pid]
        spent[name] = spent.get(name, 0.0) + cpu - before.get(pid, 0.0)
    done = iterations - 1 - FIRST
    by_most = sorted(spent, key=lambda name: -spent[name])
    return {**{name: spent[name] / done for name in by_most}, "on the clock": seconds / done}


def _spy(pid: int, name: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{name.replace(' ', '-')}.{pid}.txt"
    return subprocess.Popen(
        ["py-spy", "record", "--pid", str(pid), "--format", "raw", "--nonblocking", "--output", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--iterations", type=int, default=40, help="of the run; at least 3")
    parser.add_argument("--stacks", type=Path, metavar="FOLDER", help="sample stacks by py-spy, and leave them here")
    arguments = parse(parser, iterations=4)
    if arguments.iterations < FIRST + 2:
        raise SystemExit(f"--iterations {arguments.iterations}: the first {FIRST + 1} do not count, so give more")
    if arguments.stacks is not None and shutil.which("py-spy") is None:
        raise SystemExit("--stacks needs py-spy on the PATH: pip install py-spy")
    small = SMALL_RUN if arguments.smoke else ("eval.eval_interval=null", "eval.benchmarks=[]")
    options = [f"rollout.num_rollout={arguments.iterations}", *small, *arguments.set]
    found = measure(arguments.recipe, options, arguments.iterations, arguments.stacks)
    say(f"{arguments.iterations} iterations on {os.cpu_count()} cores")
    shown = Table("", "ms an iteration")
    for name, seconds in found.items():
        shown.add_row(name, f"{seconds * 1000:.0f}")
    Console().print(shown)
    for path in sorted(arguments.stacks.glob(f"{DRIVER}.*.txt")) if arguments.stacks is not None else []:
        for name, share in functions(path):
            print(f"{share:6.1%}  {name}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
