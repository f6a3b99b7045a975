"""What it brings to learn while the next batches are collected: whole durable runs, in turns.

    python -m bench.pipeline [RECIPE] [--set a.b=c] [--modes sync lagged …] [--iterations 24] [--seeds 42 1 2 3 4]
                             [--score-every 2] [--pairs 1] [--smoke] [--json FILE]

    sync         one rollout engine and the trainer, a core each, in turn
    lagged       the same side by side, with weights one iteration older
    streaming S  the same, all the time: with the newest weights, trained on at an age of S at most
    two threads  in turn, with both cores for rollout (an engine each), and both for training
    two engines  in turn, with both cores for rollout, and one for training
    bare         the loop of bench/bare_loop.py, in turn, a core each: nothing is durable; it learns as `sync` does
    bare lagged  the same loop with its halves side by side: it learns as `lagged` does

From the first rollout's start to the last update's end: starts are left out, and evaluations come after the run, of the
weights that it left on its way. Every run has processes of its own; each seed is a round with one run of each.
By default the task is that of examples/counting, whose answers are long-tailed; it is built on first use.

With `--pairs N` so many runs stand side by side, each pinned to two cores of its own. What was found is written to the
file after every run; a run that fails is told of and left out.

    to 0.80      seconds until weights score 0.80 at the first benchmark, between two that were evaluated on a
                 straight line
    idle         share of the time in which the rollout engines, and the trainer, did not work
    p99/median   of the lengths of all responses; the model ends them itself
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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
MODES = {
    "sync": ONE_CORE_EACH,
    "lagged": LAGGED,
    **{
        f"streaming {age}": (*ONE_CORE_EACH, "rollout.pipeline=streaming", f"rollout.max_age={age}")
        for age in (1, 2, 4)
    },
    "two threads": ("rollout.num_engines=2", "training.num_threads=2"),
    "two engines": ("rollout.num_engines=2", "training.num_threads=1"),
    "bare": ONE_CORE_EACH,
    "bare lagged": LAGGED,
}
BARE = ("bare", "bare lagged")
USUAL = [name for name in MODES if name not in ("two engines", *BARE)]

STAGGER = 2
"""Seconds between the first starts side by side: clusters that look for free ports at the same moment find the same."""

Cores = Sequence[int] | None
"""Those that a run is pinned to; None for any."""


def pinned(cores: Cores) -> list[str]:
    """The beginning of a command that runs on these cores alone."""
    if not cores:
        return []
    program = f"import os, sys; os.sched_setaffinity(0, {set(cores)}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program]


def pairs_of_cores(count: int) -> list[Cores]:
    """Disjoint ones of those that this process may use; for one pair, whatever there is."""
    if count == 1:
        return [None]
    cores = sorted(os.sched_getaffinity(0))
    if 2 * count > len(cores):
        raise SystemExit(f"--pairs {count} needs {2 * count} cores, and there are {len(cores)}")
    return [cores[first : first + 2] for first in range(0, 2 * count, 2)]


def bare(recipe: str, overrides: list[str], seed: int, cores: Cores) -> Outcome:
    """A run of the bare loop, which is evaluated before and after."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = [word for option in overrides for word in ("--set", option)]
        given = [recipe, "--seeds", str(seed), "--json", str(found), *options]
        command = [*pinned(cores), sys.executable, "-m", "bench.bare_loop", *given]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=DEADLINE)
        (outcome,) = json.loads(found.read_text())
    steps = [iteration["seconds"] for iteration in outcome["iterations"]]
    return Outcome(
        outcome["ends"][-1],
        outcome["score_after"],
        ends=outcome["ends"],
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


def _faster(found: dict[int, Outcome], sync: dict[int, Outcome]) -> str:
    """How many times as fast to the goal as `sync` with the same seed."""
    pairs = [(sync[seed], outcome) for seed, outcome in found.items() if seed in sync]
    to_goal = [(seconds_to(GOAL, one), seconds_to(GOAL, other)) for one, other in pairs]
    ratios = [one / other for one, other in to_goal if one is not None and other is not None]
    return _spread(ratios, 2) if ratios else "–"


def table(found: dict[str, dict[int, Outcome]]) -> Table:
    """A row for each mode: medians over seeds, and ranges in parentheses."""
    goal = f"to {GOAL:.2f}"
    columns = "", "seconds", f"{goal}, s", f"× sync {goal}", "tokens/s", "rollout idle", "trainer idle", "scores"
    shown = Table(*columns)
    for name, by_seed in found.items():
        outcomes = list(by_seed.values())
        if not outcomes:
            continue
        shown.add_row(
            name,
            _spread([outcome.seconds for outcome in outcomes]),
            _spread([seconds_to(GOAL, outcome) for outcome in outcomes]),
            _faster(by_seed, found.get("sync", {})),
            _spread([outcome.tokens / outcome.seconds for outcome in outcomes], 0),
            _spread([1 - outcome.rollout_seconds / outcome.seconds for outcome in outcomes], 2),
            _spread([1 - outcome.train_seconds / outcome.seconds for outcome in outcomes], 2),
            " ".join(f"{score:.3f}" for outcome in outcomes for score in outcome.scores.values()),
        )
    return shown


def main() -> None:
    """Command line; exits non-zero, at the end, if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default=RECIPE)
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=USUAL, help="which, in this order")
    parser.add_argument("--iterations", type=int, default=24, help="iterations of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="one run of each mode by each")
    parser.add_argument("--score-every", type=int, default=2, help="evaluate the weights of every so many iterations")
    parser.add_argument("--pairs", type=int, default=1, help="runs side by side, each on two cores of its own")
    arguments = parse(parser, modes=["sync", "lagged", "streaming 2", *BARE], iterations=3, seeds=[42])
    if load(arguments.recipe, arguments.set).model.path == str(FOLDER / "model") and not (FOLDER / "model").is_dir():
        subprocess.run([sys.executable, "-m", "examples.counting.build"], check=True)
    small = SMALL_RUN if arguments.smoke else ()
    common = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *small]
    free: queue.SimpleQueue[Cores] = queue.SimpleQueue()
    for cores in pairs_of_cores(arguments.pairs):
        free.put(cores)

    def measure(name: str, seed: int) -> Outcome:
        options = [*common, *MODES[name], *arguments.set, f"seed={seed}"]
        cores = free.get()
        try:
            if name in BARE:
                return bare(arguments.recipe, options, seed, cores)
            return durable_run(arguments.recipe, options, score_every=arguments.score_every, pinned=pinned(cores))
        finally:
            free.put(cores)

    found: dict[str, dict[int, Outcome]] = {name: {} for name in arguments.modes}
    failed = []
    with ThreadPoolExecutor(arguments.pairs) as beside:
        runs = {}
        for name, seed in [(name, seed) for seed in arguments.seeds for name in found]:
            runs[beside.submit(measure, name, seed)] = name, seed
            if len(runs) < arguments.pairs:
                time.sleep(STAGGER)
        for run in as_completed(runs):
            name, seed = runs[run]
            try:
                found[name][seed] = run.result()
            except (subprocess.SubprocessError, OSError) as problem:
                failed.append(f"{name} with seed {seed}: {problem}")
                say(failed[-1])
                continue
            scores = ", ".join(f"{benchmark} {score:.3f}" for benchmark, score in found[name][seed].scores.items())
            say(f"seed {seed}: {name} {found[name][seed].seconds:.1f} s  {scores}")
            if arguments.json is not None:
                rows = {mode: [asdict(one) for one in by_seed.values()] for mode, by_seed in found.items() if by_seed}
                arguments.json.write_text(json.dumps(rows, indent=1))
    Console(width=180).print(table(found))
    outcomes = [outcome for by_seed in found.values() for outcome in by_seed.values()]
    if lengths := [length for one in outcomes for iteration in one.iterations for length in iteration.response_lengths]:
        median, last = tail(lengths)
        print(f"responses: median {median:.0f} tokens, p99 {last:.0f}: {last / median:.1f} times")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
