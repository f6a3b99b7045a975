"""Test that every algorithm learns on every seed.

    python -m bench.learning [--algorithms grpo …] [--seeds 1 2 …] [--set a.b=c] [--store DIR] [--plot FILE] [--smoke]
                             [--json FILE]

Trains the quickstart as durable runs, one for each algorithm and seed: with the same model, data, number of samples and
learning rate, and for each algorithm the setting in `ALGORITHMS`. The worst seed counts. Runs have fixed names in the
store: an interrupted benchmark resumes them.
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from bench.command import SMALL_RUN, parse, say
from bench.durable_run import CAIRN, DEADLINE
from cairn.flows.reading.views import run_status
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store

matplotlib.use("agg")

from matplotlib import pyplot

RECIPE = "configs/recipes/quickstart.yaml"
TARGET = 0.80
"""Held-out accuracy that the worst seed must reach."""

SEVERAL_STEPS = ("training.num_steps_per_rollout=4", "training.lr=8.0e-4")
"""Options of algorithms that differ in their clipping: with one step a rollout every ratio is 1, and they would be
equal to GRPO."""

ALGORITHMS = {
    "grpo": (),
    "dr_grpo": ("algorithm.grpo_std_normalization=false", "algorithm.loss_scale_factor=24"),
    "rloo": ("algorithm.advantage_estimator=rloo",),
    "reinforce_plus_plus": (
        "algorithm.advantage_estimator=reinforce_plus_plus",
        "algorithm.normalize_advantages=true",
    ),
    "gspo": (
        "algorithm.advantage_estimator=gspo",
        "algorithm.eps_clip=0.03",
        "algorithm.eps_clip_high=0.04",
        *SEVERAL_STEPS,
    ),
    "cispo": (
        "algorithm.advantage_estimator=cispo",
        "algorithm.eps_clip=1.0",
        "algorithm.eps_clip_high=0.28",
        "algorithm.calculate_per_token_loss=true",
        *SEVERAL_STEPS,
    ),
    "ppo": (
        "algorithm.advantage_estimator=ppo",
        "algorithm.normalize_advantages=true",
        "algorithm.num_critic_only_steps=3",
        "training.critic_lr=2.0e-3",
        "training.critic_lr_warmup_iters=2",
    ),
}
"""Options in addition to the recipe's."""


def trained(store: str, algorithm: str, seed: int, more: Sequence[str]) -> Ledger:
    """Return the completed run of an algorithm and a seed; create or resume it where necessary."""
    name = f"{algorithm}-{seed}".replace("_", "-")
    options = [word for option in (*ALGORITHMS[algorithm], *more, f"seed={seed}") for word in ("--set", option)]
    command = [CAIRN, "train", RECIPE, "--run", name, "--store", store, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
    return Ledger.open(open_store(store), name)


def rewards(ledger: Ledger) -> list[float]:
    """Return the mean reward of each iteration."""
    last = ledger.last_iteration()
    commits = [ledger.find(index, Step.ADVANTAGE) for index in range(0 if last is None else last + 1)]
    return [commit.metrics["raw_reward"] for commit in commits if commit is not None]


def plot(curves: dict[str, list[list[float]]], scores: dict[str, list[float]], file: Path) -> None:
    """Draw the reward curves of every algorithm, one panel each, and the accuracy of every seed in the last panel."""
    figure, panels = pyplot.subplots(2, 4, figsize=(14, 6), sharey=True, layout="constrained")
    for panel, (name, runs) in zip(panels.flat, curves.items(), strict=False):
        for run in runs:
            panel.plot(run, linewidth=1)
        panel.set(title=name, xlabel="iteration", ylim=(0, 1))
        panel.grid(alpha=0.3)
    last = panels.flat[-1]
    for place, (_, found) in enumerate(scores.items()):
        last.scatter([place] * len(found), found, s=16)
    last.axhline(TARGET, linestyle="--", color="grey", linewidth=1)
    last.set(title="held-out accuracy at the end")
    last.set_xticks(range(len(scores)), scores, rotation=30, ha="right")
    for row in panels:
        row[0].set_ylabel("mean reward")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALGORITHMS, default=list(ALGORITHMS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option of the recipe")
    parser.add_argument("--store", default="build/bench/learning", help="where runs are kept (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("build/bench/learning.png"), metavar="FILE")
    arguments = parse(parser, algorithms=["gspo"], seeds=[1])
    if not arguments.smoke:
        measure(arguments, arguments.set)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.store, arguments.plot = folder, Path(folder, "learning.png")
        measure(arguments, ["rollout.num_rollout=2", *SMALL_RUN, *arguments.set])


def measure(arguments: argparse.Namespace, more: Sequence[str]) -> None:
    """Train all runs, print their results, and exit non-zero where a seed is below the target."""
    curves, scores = defaultdict(list), defaultdict(list)
    for algorithm in arguments.algorithms:
        for seed in arguments.seeds:
            ledger = trained(arguments.store, algorithm, seed, more)
            curves[algorithm].append(rewards(ledger))
            measured = run_status(ledger.store, ledger.run).eval.get("heldout")
            scores[algorithm].append(measured.last if measured else curves[algorithm][-1][-1])
            before = f"{measured.first:.3f} → " if measured else ""
            say(f"{algorithm}, seed {seed}: {before}{scores[algorithm][-1]:.3f}")
        print(f"{algorithm}: worst seed {min(scores[algorithm]):.3f}, best {max(scores[algorithm]):.3f}", flush=True)
    plot(curves, scores, arguments.plot)
    short = {name: found for name, found in scores.items() if min(found) < TARGET}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"scores": scores, "rewards": curves}, indent=1) + "\n")
    if short and not arguments.smoke:
        raise SystemExit(f"below {TARGET} with their worst seed: {', '.join(short)}")


if __name__ == "__main__":
    main()
