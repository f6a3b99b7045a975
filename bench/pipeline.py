"""What it brings to learn while the next batches are collected: whole durable runs, turn by turn.

    python -m bench.pipeline [RECIPE] [--set a.b=c] [--beside lagged …] [--iterations 40] [--seeds 42 1 2 3 4] [--smoke]
                             [--json FILE]

    sync         one rollout engine and the trainer, a core each, in turn
    lagged       the same side by side, with weights one iteration older
    streaming S  the same, all the time: with the newest weights, trained on at an age of S at most
    two engines  in turn, rollout on both cores
    two threads  in turn, training on both cores too
    bare         the loop of bench/bare_loop.py, in turn, a core each: nothing is durable; it learns as `sync` does

From the first rollout's start to the last update's end: starts are left out, and so is the time in which there was an
evaluation and the trainer did not work. Every run has processes of its own; each seed is a round with one run of each.
By default the task is that of examples/counting, whose answers are long-tailed; it is built on first use.

    to 0.80      seconds until the first benchmark's score is 0.80, between two evaluations on a straight line
    idle         share of the time in which the rollout engines, and the trainer, did not work
    p99/median   of the lengths of all responses; the model ends them itself
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import DEADLINE, Outcome, durable_run
from cairn.configs.loader import load
from examples.counting.build import FOLDER

RECIPE = "configs/recipes/counting.yaml"
SEEDS = (42, 1, 2, 3, 4)
GOAL = 0.80
"""Score to reach."""

ONE_CORE_EACH = ("rollout.num_engines=1", "training.num_threads=1")
LAGGED = (*ONE_CORE_EACH, "rollout.pipeline=lagged")
VARIANTS = {
    "sync": ONE_CORE_EACH,
    "lagged": LAGGED,
    **{
        f"streaming {age}": (*ONE_CORE_EACH, "rollout.pipeline=streaming", f"rollout.max_age={age}")
        for age in (1, 2, 4)
    },
    "two engines": ("rollout.num_engines=2", "training.num_threads=1"),
    "two threads": ("rollout.num_engines=2", "training.num_threads=2"),
}
BESIDE = [name for name in VARIANTS if name != "sync"]


def bare(recipe: str, overrides: list[str], seed: int, points: dict[int, float]) -> Outcome:
    """A run of the bare loop. `points`: the scores of `sync` with the same seed, which ends in the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = [word for option in overrides for word in ("--set", option)]
        given = [recipe, "--seeds", str(seed), "--json", str(found), *options]
        command = [sys.executable, "-m", "bench.bare_loop", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DEADLINE)
        (outcome,) = json.loads(found.read_text())
    steps = [iteration["seconds"] for iteration in outcome["iterations"]]
    ends = np.cumsum([sum(step.values()) for step in steps]).tolist()
    return Outcome(
        ends[-1],
        outcome["score_after"],
        ends=ends,
        points=points,
        tokens=sum(iteration["tokens"] for iteration in outcome["iterations"]),
        rollout_seconds=sum(step["rollout"] for step in steps),
        train_seconds=sum(step["train"] + step["sync"] for step in steps),
        sync_seconds=sum(step["sync"] for step in steps),
    )


def seconds_to(goal: float, outcome: Outcome) -> float | None:
    """When the score reached `goal`; None if it never did. Nothing is known before the first evaluation."""
    before: tuple[float, float] | None = None
    for iterations, score in sorted(outcome.points.items()):
        now = outcome.ends[iterations - 1] if iterations else 0.0
        if score >= goal:
            if before is None:
                return now
            then, lower = before
            return then + (now - then) * (goal - lower) / (score - lower)
        before = now, score
    return None


def tail(lengths: Sequence[int]) -> tuple[float, float]:
    """Median and 99th percentile."""
    median, last = np.percentile(lengths, [50, 99])
    return float(median), float(last)


def _spread(values: Sequence[float | None], digits: int = 1) -> str:
    """Median and range; a value that is missing is greater than all others."""
    known = sorted(value for value in values if value is not None)
    if len(known) <= len(values) // 2:
        return f"not in {len(values) - len(known)} of {len(values)}"
    middle = statistics.median([*known, *[float("inf")] * (len(values) - len(known))])
    missing = f", {len(values) - len(known)} not" if len(known) < len(values) else ""
    return f"{middle:.{digits}f} ({known[0]:.{digits}f} – {known[-1]:.{digits}f}{missing})"


def table(found: dict[str, list[Outcome]]) -> Table:
    """A row for each variant: medians, and ranges in parentheses."""
    shown = Table(
        "", "seconds", "of sync", "of bare", f"to {GOAL:.2f}, s", "tokens/s", "rollout idle", "trainer idle", "scores"
    )
    middle = {name: statistics.median(outcome.seconds for outcome in outcomes) for name, outcomes in found.items()}
    for name, outcomes in found.items():
        shown.add_row(
            name,
            _spread([outcome.seconds for outcome in outcomes]),
            *(f"{middle[name] / middle[other]:.2f}" for other in ("sync", "bare")),
            _spread([seconds_to(GOAL, outcome) for outcome in outcomes]),
            _spread([outcome.tokens / outcome.seconds for outcome in outcomes], 0),
            _spread([1 - outcome.rollout_seconds / outcome.seconds for outcome in outcomes], 2),
            _spread([1 - outcome.train_seconds / outcome.seconds for outcome in outcomes], 2),
            " ".join(f"{score:.3f}" for outcome in outcomes for score in outcome.scores.values()),
        )
    return shown


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=RECIPE)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--beside", nargs="+", choices=BESIDE, default=BESIDE, help="beside sync and bare")
    parser.add_argument("--iterations", type=int, default=40, help="iterations of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="one run of each kind by each")
    arguments = parse(parser, beside=["lagged", "streaming 2"], iterations=3, seeds=[42])
    if load(arguments.recipe, arguments.set).model.path == str(FOLDER / "model") and not (FOLDER / "model").is_dir():
        subprocess.run([sys.executable, "-m", "examples.counting.build"], check=True)
    small = SMALL_RUN if arguments.smoke else ()
    common = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null"]
    found: dict[str, list[Outcome]] = {name: [] for name in ("sync", *arguments.beside, "bare")}
    for seed in arguments.seeds:
        for name, outcomes in found.items():
            options = [*common, *small, *VARIANTS.get(name, ONE_CORE_EACH), *arguments.set, f"seed={seed}"]
            outcomes.append(
                bare(arguments.recipe, options, seed, found["sync"][-1].points)
                if name == "bare"
                else durable_run(arguments.recipe, options)
            )
            scores = ", ".join(f"{benchmark} {score:.3f}" for benchmark, score in outcomes[-1].scores.items())
            say(f"seed {seed}: {name} {outcomes[-1].seconds:.1f} s  {scores}")
    Console(width=160).print(table(found))
    median, last = tail([n for outcome in found["sync"] for one in outcome.iterations for n in one.response_lengths])
    print(f"responses of sync: median {median:.0f} tokens, p99 {last:.0f}: {last / median:.1f} times")
    if arguments.json is not None:
        rows = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in found.items()}
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
