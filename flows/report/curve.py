"""Pictures of a run, drawn from its ledger."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure

from cairn.configs.loader import from_manifest
from cairn.flows.reading.samples import benchmark_scores, generated_reward
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger

_REQUESTS = 8


def reward_curve(ledger: Ledger, path: str | Path) -> None:
    """Draw the mean reward of every iteration, and every benchmark's score, into an image file; the suffix of `path`
    chooses the format."""
    config = from_manifest(ledger.manifest.config)
    last = ledger.last_iteration()
    iterations = range(0 if last is None else last + 1)
    with ThreadPoolExecutor(_REQUESTS) as readers:
        commits = list(readers.map(lambda iteration: ledger.find(iteration, Step.ADVANTAGE), iterations))
        trained = [commit for commit in commits if commit is not None]
        means = list(readers.map(lambda commit: generated_reward(ledger, commit), trained))
    rewards = {commit.iteration: mean for commit, mean in zip(trained, means, strict=True) if mean is not None}
    chosen = {commit.iteration: commit.metrics["raw_reward"] for commit in trained if commit.iteration in rewards}
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    if rewards:
        axes.plot(list(rewards), list(rewards.values()), label="training reward")
    if chosen != rewards:
        axes.plot(list(chosen), list(chosen.values()), alpha=0.4, label="of the samples trained on")
    for name, points in benchmark_scores(ledger, config).items():
        if points:
            axes.plot(list(points), list(points.values()), marker="o", linestyle="--", label=name)
    axes.set(title=ledger.run, xlabel="iteration", ylabel="mean reward")
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(loc="best")
    figure.savefig(path, dpi=150)
