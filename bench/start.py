"""How long a run takes to begin: from `cairn train` in an empty folder to its first step commit, and which processes
compute meanwhile.

    python -m bench.start [RECIPE] [--set a.b=c] [--rounds 3] [--smoke] [--json FILE]

Without an evaluation before training. Seconds of CPU time depend little on what else the machine does, unlike the time
on the clock: on two idle cores that is half of their sum and what no core computed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say

DEADLINE = 600.0
"""Seconds to the first commit."""

CAIRN = str(Path(sys.executable).with_name("cairn"))

PARTS = {
    "cairn.flows.orchestration.server": "Prefect's server",
    "cairn.tasks.rewards.worker": "graders",
    "gcs_server": "Ray and its agents",
    "raylet/raylet": "Ray and its agents",
    "reaper.py": "Ray and its agents",
    "default_worker": "engines",
    "ray::": "engines",
    "cairn.engines.fleet.warm": "engines",
    "Agent": "Ray and its agents",
}
"""By what is in a command line; the last that fits."""


def one_round(recipe: str, overrides: list[str]) -> dict[str, float]:
    """Start a run, and kill it after its first commit."""
    recipe, options = str(Path(recipe).absolute()), [word for option in overrides for word in ("--set", option)]
    environment = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        command = [CAIRN, "train", recipe, "--run", "start", "--store", store, *options]
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as driver:
            used: dict[int, tuple[str, float]] = {}
            commits = Path(store) / "runs/start/iterations/000000"
            while not list(commits.glob("*.json")):
                if driver.poll() is not None or time.monotonic() - began > DEADLINE:
                    driver.kill()
                    sys.exit("the run came to no commit; its message stands above")
                for process in [found := psutil.Process(driver.pid), *found.children(recursive=True)]:
                    with suppress(psutil.Error):
                        times = process.cpu_times()
                        used[process.pid] = part_of(process, driver.pid), times.user + times.system
                time.sleep(0.1)
            clock = time.monotonic() - began
            driver.kill()
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
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parse(parser, rounds=1)
    overrides = ["tracking.tensorboard_dir=null", "eval.skip_eval_before_train=true"]
    overrides += [*(SMALL_RUN if arguments.smoke else ()), *arguments.set]
    found = defaultdict(list)
    for turn in range(arguments.rounds):
        say(f"round {turn + 1} of {arguments.rounds}")
        for name, seconds in one_round(arguments.recipe, overrides).items():
            found[name].append(seconds)
    table = Table("", "median s", "range", title="from the command to the first step commit")
    for name, values in found.items():
        table.add_row(name, f"{statistics.median(values):.1f}", f"{min(values):.1f} – {max(values):.1f}")
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
