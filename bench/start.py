"""Startup time of a run: from `cairn train` in an empty folder to its first step commit, with the CPU time of its
processes; or of `cairn up`, until a browser receives the UI and a form can be filled in.

    python -m bench.start [RECIPE] [--up] [--set a.b=c] [--rounds 3] [--smoke] [--json FILE]

Without an evaluation before training. CPU seconds depend little on the machine's other load, unlike wall-clock time: on
two idle cores, wall-clock time is half of the sum of the CPU seconds and of the cores' idle time.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say

DEADLINE = 600.0
"""Seconds to the first commit at most."""

CAIRN = str(Path(sys.executable).with_name("cairn"))

PARTS = {
    "cairn.flows.orchestration.server": "Prefect's server",
    "cairn.flows.deployments.serving": "deployments",
    "cairn.tasks.grading.worker": "graders",
    "gcs_server": "Ray and its agents",
    "raylet/raylet": "Ray and its agents",
    "reaper.py": "Ray and its agents",
    "default_worker": "engines",
    "ray::": "engines",
    "cairn.engines.fleet.warm": "engines",
    "Agent": "Ray and its agents",
}
"""Part of the startup by text in the command line; the last match counts."""


def one_round(recipe: str, overrides: list[str]) -> dict[str, float]:
    """Start a run, and kill it after its first commit."""
    recipe, options = str(Path(recipe).absolute()), [word for option in overrides for word in ("--set", option)]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        commits = Path(store) / "runs/start/iterations/000000"
        command = [CAIRN, "train", recipe, "--run", "start", "--store", store, *options]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as driver:
            found = until(lambda: any(commits.glob("*.json")), driver)
            driver.kill()
    return found


def one_start_of_up() -> dict[str, float]:
    """Start Prefect, the deployments and a Ray head in an empty folder, and stop them when they are ready."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PREFECT_API_URL", "RAY_ADDRESS")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5) as client,
    ):

        def usable() -> bool:
            with suppress(httpx.HTTPError):
                form = client.get("/api/deployments/name/train/train")
                page = client.get("/deployments", headers={"accept": "text/html"})
                return form.is_success and form.json()["status"] == "READY" and "<html" in page.text
            return False

        command = [CAIRN, "up", "--port", str(port)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=folder) as parts:
            found = until(usable, parts)
            parts.send_signal(signal.SIGINT)  # what it has started ends with it
    return found


def until(begun: Callable[[], bool], driver: "subprocess.Popen[bytes]") -> dict[str, float]:
    """Return the seconds from now until `begun` is true: wall-clock, and CPU time by part."""
    began = time.monotonic()
    used: dict[int, tuple[str, float]] = {}
    while not begun():
        if driver.poll() is not None or time.monotonic() - began > DEADLINE:
            driver.kill()
            sys.exit("it has not begun; its message stands above")
        for process in [found := psutil.Process(driver.pid), *found.children(recursive=True)]:
            with suppress(psutil.Error):
                times = process.cpu_times()
                used[process.pid] = part_of(process, driver.pid), times.user + times.system
        time.sleep(0.1)
    clock = time.monotonic() - began
    shares: dict[str, float] = defaultdict(float)
    for part, seconds in used.values():
        shares[part] += seconds
    return {**shares, "all CPU time": sum(shares.values()), "on the clock": clock}


def part_of(process: psutil.Process, driver: int) -> str:
    words = " ".join(process.cmdline())
    fitting = [name for text, name in PARTS.items() if text in words]
    return "driver" if process.pid == driver or not fitting else fitting[-1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--up", action="store_true", help="`cairn up` in place of a run")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, rounds=1)
    overrides = ["tracking.tensorboard_dir=null", "eval.skip_eval_before_train=true"]
    overrides += [*(SMALL_RUN if arguments.smoke else ()), *arguments.set]
    found = defaultdict(list)
    for turn in range(arguments.rounds):
        say(f"round {turn + 1} of {arguments.rounds}")
        times = one_start_of_up() if arguments.up else one_round(arguments.recipe, overrides)
        for name, seconds in times.items():
            found[name].append(seconds)
    reached = "a form in the interface" if arguments.up else "the first step commit"
    table = Table("", "median s", "range", title=f"from the command to {reached}")
    for name, values in found.items():
        table.add_row(name, f"{statistics.median(values):.1f}", f"{min(values):.1f} – {max(values):.1f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
