"""What it brings to learn while the next batch is collected: whole durable runs, turn by turn.

    python -m bench.pipeline [RECIPE] [--set a.b=c] [--beside lagged …] [--iterations 40] [--seeds 42 1 2 3 4] [--smoke]
                             [--json FILE]

    sync        one rollout engine and the trainer, a core each, in turn
    lagged      the same side by side, with weights one iteration older
    two engines in turn, rollout on both cores
    two threads in turn, training on both cores too
    bare        the loop of bench/bare_loop.py, in turn, a core each: nothing is durable

From the first rollout's start to the last update's end: starts and evaluations are left out. Every run has processes of
its own; each seed is a round with one run of each, and the benchmarks' scores after it.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import DEADLINE, Outcome, durable_run

SEEDS = (42, 1, 2, 3, 4)
ONE_CORE_EACH = ("rollout.num_engines=1", "training.num_threads=1")
LAGGED = (*ONE_CORE_EACH, "rollout.pipeline=lagged")
VARIANTS = {
    "sync": ONE_CORE_EACH,
    "lagged": LAGGED,
    "two engines": ("rollout.num_engines=2", "training.num_threads=1"),
    "two threads": ("rollout.num_engines=2", "training.num_threads=2"),
}
BESIDE = [name for name in VARIANTS if name != "sync"]


def bare(recipe: str, overrides: list[str], seed: int) -> Outcome:
    """A run of the bare loop."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = [word for option in overrides for word in ("--set", option)]
        given = [recipe, "--seeds", str(seed), "--json", str(found), *options]
        command = [sys.executable, "-m", "bench.bare_loop", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DEADLINE)
        (outcome,) = json.loads(found.read_text())
        return Outcome(sum(sum(i["seconds"].values()) for i in outcome["iterations"]), outcome["score_after"])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--beside", nargs="+", choices=BESIDE, default=BESIDE, help="beside sync and bare")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="one run of each kind by each")
    arguments = parse(parser, beside=["lagged"], iterations=2, seeds=[42])
    small = SMALL_RUN if arguments.smoke else ()
    common = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null"]
    if not arguments.smoke:
        common.append(f"eval.eval_interval={arguments.iterations}")
    found: dict[str, list[Outcome]] = {name: [] for name in ("sync", *arguments.beside, "bare")}
    for seed in arguments.seeds:
        for name, outcomes in found.items():
            options = [*common, *small, *VARIANTS.get(name, ONE_CORE_EACH), *arguments.set, f"seed={seed}"]
            outcomes.append(
                bare(arguments.recipe, options, seed) if name == "bare" else durable_run(arguments.recipe, options)
            )
            scores = ", ".join(f"{benchmark} {score:.3f}" for benchmark, score in outcomes[-1].scores.items())
            say(f"seed {seed}: {name} {outcomes[-1].seconds:.1f} s  {scores}")
    table = Table("", "median s", "range", "of sync", "of bare", "scores")
    middle = {name: statistics.median(outcome.seconds for outcome in outcomes) for name, outcomes in found.items()}
    for name, outcomes in found.items():
        seconds = [outcome.seconds for outcome in outcomes]
        ratios = [f"{middle[name] / middle[other]:.2f}" for other in ("sync", "bare")]
        scores = " ".join(f"{score:.3f}" for outcome in outcomes for score in outcome.scores.values())
        table.add_row(name, f"{middle[name]:.1f}", f"{min(seconds):.1f} – {max(seconds):.1f}", *ratios, scores)
    Console().print(table)
    if arguments.json is not None:
        rows = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in found.items()}
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
