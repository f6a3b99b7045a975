"""What it brings to learn while the next batch is collected: whole durable runs, turn by turn.

    python -m bench.pipeline [RECIPE] [--set a.b=c] [--iterations 40] [--rounds 3] [--smoke] [--json FILE]

    sync        one rollout engine and the trainer, a core each, in turn
    lagged      the same side by side, with weights one iteration older
    two cores   in turn, each on both cores: two rollout engines, two threads of the trainer
    bare        the loop of bench/bare_loop.py, in turn, a core each: nothing is durable

From the first step's start to the last one's end, so without starts; evaluations and checkpoints are left out. Every
run has processes of its own; a round makes one of each.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from cairn.storage.commits import Step
from cairn.storage.ledger import Ledger
from cairn.storage.store import open_store

DEADLINE = 1200
"""Seconds of one run."""

ONE_CORE_EACH = ("rollout.num_engines=1", "training.num_threads=1")
VARIANTS = {
    "sync": ONE_CORE_EACH,
    "lagged": (*ONE_CORE_EACH, "rollout.pipeline=lagged"),
    "two cores": ("rollout.num_engines=2", "training.num_threads=2"),
}

CAIRN = str(Path(sys.executable).with_name("cairn"))


def durable(recipe: str, overrides: list[str]) -> float:
    """Seconds of a durable run's iterations, by its own ledger."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        options = [word for option in overrides for word in ("--set", option)]
        command = [CAIRN, "train", recipe, "--run", "measured", "--store", store, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        ledger = Ledger.open(open_store(store), "measured")
        last = ledger.last_iteration()
        assert last is not None
        began = min(commit.started_at for commit in ledger.commits(0))
        ended = ledger.find(last, Step.SYNC)
        assert ended is not None
        return ended.committed_at - began


def bare(recipe: str, overrides: list[str]) -> float:
    """Seconds of the bare loop's iterations."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = [word for option in overrides for word in ("--set", option)]
        command = [sys.executable, "-m", "bench.bare_loop", recipe, "--seeds", "42", "--json", str(found), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        (outcome,) = json.loads(found.read_text())
        return sum(sum(iteration["seconds"].values()) for iteration in outcome["iterations"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    arguments = parse(parser, iterations=2, rounds=1)
    left_out = ["eval.eval_interval=null", "eval.benchmarks=[]", "checkpoint.save_interval=null"]
    small = SMALL_RUN if arguments.smoke else ()
    common = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *left_out]
    seconds: dict[str, list[float]] = {name: [] for name in (*VARIANTS, "bare")}
    for turn in range(arguments.rounds):
        for name in seconds:
            options = [*common, *small, *VARIANTS.get(name, ONE_CORE_EACH), *arguments.set]
            seconds[name].append((bare if name == "bare" else durable)(arguments.recipe, options))
            say(f"round {turn}: {name} {seconds[name][-1]:.1f} s")
    table = Table("", "median s", "range", "of sync", "of bare")
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        ratios = [f"{middle[name] / middle[other]:.2f}" for other in ("sync", "bare")]
        table.add_row(name, f"{middle[name]:.1f}", f"{min(values):.1f} – {max(values):.1f}", *ratios)
    Console().print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
