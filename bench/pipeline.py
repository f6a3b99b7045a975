"""Benefit of learning while the next batches are collected: whole durable runs, alternating.

    python -m bench.pipeline [RECIPE] [--set a.b=c] [--modes sync lagged …] [--iterations 24] [--seeds 42 1 2 3 4]
                             [--score-every 2] [--hidden 256] [--pairs 1] [--apart] [--smoke] [--json FILE]

    sync         one rollout engine and the trainer, a core each, one after the other
    lagged       the same concurrently, with weights one iteration older
    streaming S  the same without pauses: with the newest weights, trained on at an age of at most S
    two threads  one after the other, with both cores for rollout (an engine each), and both for training
    two engines  one after the other, with both cores for rollout, and one for training
    bare         the loop of bench/bare_loop.py, one after the other, a core each: not durable; it learns as `sync` does
    bare lagged  the same loop with its halves concurrent: it learns as `lagged` does

Time counts from the first rollout's start to the last update's end: startup is left out, and evaluations follow the
run, on the weights that it saved. Every run has its own processes; each seed is a round with one run of each mode. The
default task is that of examples/counting, whose answers are long-tailed; it is built on first use.

With `--pairs N` that many runs are concurrent, each pinned to its own two cores. With `--apart` the trainer has one of
them alone in modes with a core each. The rollout engine, the driver, Prefect and Ray share the other, because they take
none of the trainer's time where it has a GPU; otherwise the system places them. With `--hidden N` a random model of
that width replaces the recipe's: iterations last longer, and nothing is learned. Results are written to the file after
every run; a failed run is reported and left out.

    after it     seconds an iteration, from the end of the first one's update to that of the last
    to 0.80      seconds until weights score 0.80 at the first benchmark, linearly interpolated between two evaluations
    idle         share of the time in which the rollout engines, and the trainer, did not work
    p99/median   of the lengths of all responses, which the model itself ends
"""

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import DEADLINE, Outcome, durable_run
from cairn.configs.loader import load
from examples.counting.build import FOLDER

RECIPE = "configs/recipes/counting.yaml"
SEEDS = (42, 1, 2, 3, 4)
GOAL = 0.80
"""Score to reach."""

HEAD_DIM = 32
"""Head dimension of a model for `--hidden`; two query heads share one head of keys and values."""

LOOK_INTERVAL = 2.0
"""Seconds between two searches for a trainer process that must have its own core."""

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
TWO_CORES = ("two threads", "two engines")
USUAL = [name for name in MODES if name not in ("two engines", *BARE)]

STAGGER = 2
"""Seconds between the first starts of concurrent runs: clusters that search for free ports at the same time find the
same ones."""

Cores = Sequence[int] | None
"""Cores that a run is pinned to; None for any."""


def pinned(cores: Cores) -> list[str]:
    """Return the prefix of a command that runs only on these cores."""
    if not cores:
        return []
    program = f"import os, sys; os.sched_setaffinity(0, {set(cores)}); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", program]


def pairs_of_cores(count: int, *, apart: bool) -> list[Cores]:
    """Return disjoint pairs of the cores that this process may use; no pinning for a single pair without `apart`."""
    if count == 1 and not apart:
        return [None]
    cores = sorted(os.sched_getaffinity(0))
    if 2 * count > len(cores):
        raise SystemExit(f"--pairs {count}, or --apart, needs {2 * count} cores, and there are {len(cores)}")
    return [cores[first : first + 2] for first in range(0, 2 * count, 2)]


@contextmanager
def trainer_apart(cores: Sequence[int]) -> Iterator[None]:
    """While the block runs, move a trainer process of Ray from the first of the cores to the second."""
    over = threading.Event()

    def move() -> None:
        os.sched_setaffinity(0, {cores[0]})  # of this thread: looking takes time too
        while not over.wait(LOOK_INTERVAL):
            for process in psutil.process_iter():
                with suppress(psutil.Error, OSError):
                    if process.name().startswith("ray::Train") and process.cpu_affinity() == [cores[0]]:
                        for thread in sorted(process.threads(), key=lambda thread: thread.id == process.pid):
                            os.sched_setaffinity(thread.id, {cores[1]})

    mover = threading.Thread(target=move)
    mover.start()
    try:
        yield
    finally:
        over.set()
        mover.join()


def widened(recipe: str, overrides: Sequence[str], hidden_size: int, folder: str) -> str:
    """Save a model like the recipe's with random weights and this hidden size, and its tokenizer; return the folder."""
    model = load(recipe, list(overrides)).model.path
    config, tokenizer = AutoConfig.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    config.update({"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, "head_dim": HEAD_DIM})
    heads = hidden_size // HEAD_DIM
    config.update({"num_attention_heads": heads, "num_key_value_heads": heads // 2})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bare(recipe: str, overrides: list[str], seed: int, cores: Cores, *, apart: bool) -> Outcome:
    """Execute the bare loop, with evaluations before and after, and return the outcome."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        options = [word for option in overrides for word in ("--set", option)]
        arguments = [recipe, "--seeds", str(seed), "--json", str(found), *options]
        if cores and apart:
            arguments += ["--apart", *map(str, cores)]
        command = [*pinned(cores), sys.executable, "-m", "bench.bare_loop", *arguments]
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
    """Return the seconds until the score reached `goal`; None if it never did. Nothing is known before the first
    evaluation."""
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
    """Return median and 99th percentile."""
    median, last = np.percentile(lengths, [50, 99])
    return float(median), float(last)


def _spread(values: Sequence[float | None], digits: int = 1) -> str:
    """Return median and range; a missing value counts as larger than all others."""
    known = sorted(value for value in values if value is not None)
    if len(known) <= len(values) // 2:
        return f"not in {len(values) - len(known)} of {len(values)}"
    middle = statistics.median([*known, *[float("inf")] * (len(values) - len(known))])
    missing = f", {len(values) - len(known)} not" if len(known) < len(values) else ""
    return f"{middle:.{digits}f} ({known[0]:.{digits}f} – {known[-1]:.{digits}f}{missing})"


def _faster(found: dict[int, Outcome], sync: dict[int, Outcome]) -> str:
    """Return the speedup to the goal over `sync` with the same seed."""
    pairs = [(sync[seed], outcome) for seed, outcome in found.items() if seed in sync]
    to_goal = [(seconds_to(GOAL, one), seconds_to(GOAL, other)) for one, other in pairs]
    ratios = [one / other for one, other in to_goal if one is not None and other is not None]
    return _spread(ratios, 2) if ratios else "–"


def table(found: dict[str, dict[int, Outcome]]) -> Table:
    """Return a table with a row for each mode: medians over seeds, and ranges in parentheses."""
    goal = f"to {GOAL:.2f}"
    times = "seconds", "the first", "after it", f"{goal}, s", f"× sync {goal}"
    columns = "", *times, "tokens/s", "rollout idle", "trainer idle", "scores"
    shown = Table(*columns)
    for name, by_seed in found.items():
        outcomes = list(by_seed.values())
        if not outcomes:
            continue
        shown.add_row(
            name,
            _spread([outcome.seconds for outcome in outcomes]),
            _spread([outcome.ends[0] for outcome in outcomes]),
            _spread([(one.ends[-1] - one.ends[0]) / max(1, len(one.ends) - 1) for one in outcomes], 2),
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
    parser.add_argument("--hidden", type=int, help="width of a random model in place of the recipe's, a multiple of 64")
    parser.add_argument("--pairs", type=int, default=1, help="runs side by side, each on two cores of its own")
    parser.add_argument("--apart", action="store_true", help="one core is the trainer's alone")
    arguments = parse(parser, modes=["streaming 2", "bare lagged"], iterations=2, seeds=[42])
    if arguments.hidden is not None and (arguments.hidden < 1 or arguments.hidden % (2 * HEAD_DIM)):
        raise SystemExit(f"--hidden {arguments.hidden} is no multiple of {2 * HEAD_DIM}, which heads are made of")
    if load(arguments.recipe, arguments.set).model.path == str(FOLDER / "model") and not (FOLDER / "model").is_dir():
        subprocess.run([sys.executable, "-m", "examples.counting.build"], check=True)
    small = SMALL_RUN if arguments.smoke else ()
    model: list[str] = []
    common = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *small]
    free: queue.SimpleQueue[Cores] = queue.SimpleQueue()
    for cores in pairs_of_cores(arguments.pairs, apart=arguments.apart):
        free.put(cores)

    def measure(name: str, seed: int) -> Outcome:
        options = [*common, *MODES[name], *arguments.set, *model, f"seed={seed}"]
        cores = free.get()
        try:
            apart = arguments.apart and name not in TWO_CORES
            if name in BARE:
                return bare(arguments.recipe, options, seed, cores, apart=apart)
            with trainer_apart(cores) if cores and apart else nullcontext():
                on = pinned(cores[:1] if cores and apart else cores)
                return durable_run(arguments.recipe, options, score_every=arguments.score_every, pinned=on)
        finally:
            free.put(cores)

    found: dict[str, dict[int, Outcome]] = {name: {} for name in arguments.modes}
    failed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.pairs) as pool:
        if arguments.hidden is not None:
            model.append(f"model.path={widened(arguments.recipe, arguments.set, arguments.hidden, folder)}")
        runs = {}
        for name, seed in [(name, seed) for seed in arguments.seeds for name in found]:
            runs[pool.submit(measure, name, seed)] = name, seed
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
