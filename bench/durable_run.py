"""A durable run as a user starts it, timed by its own ledger."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cairn.storage.commits import Step
from cairn.storage.ledger import Ledger
from cairn.storage.store import open_store

DEADLINE = 1200
"""Seconds of one run."""

CAIRN = str(Path(sys.executable).with_name("cairn"))


@dataclass(frozen=True)
class Outcome:
    """A whole run."""

    seconds: float
    scores: dict[str, float]
    """By benchmark, after the last update."""


def durable_run(recipe: str, overrides: Sequence[str], after: int = 0) -> Outcome:
    """Execute a recipe in processes of its own; its seconds are those from the first rollout's start, or the end of so
    many iterations, to the last update's end."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as store:
        options = [word for option in overrides for word in ("--set", option)]
        command = [CAIRN, "train", recipe, "--run", "measured", "--store", store, *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE)
        ledger = Ledger.open(open_store(store), "measured")
        last = ledger.last_iteration()
        assert last is not None
        evaluated = [commit for commit in ledger.commits(last) if commit.step is Step.EVAL]
        return Outcome(
            _end_of(ledger, last) - (_end_of(ledger, after - 1) if after else _start_of(ledger)),
            {str(commit.values["benchmark"]): commit.metrics[str(commit.values["benchmark"])] for commit in evaluated},
        )


def _start_of(ledger: Ledger) -> float:
    return min(commit.started_at for commit in ledger.commits(0) if commit.step is Step.ROLLOUT)


def _end_of(ledger: Ledger, iteration: int) -> float:
    synced = ledger.find(iteration, Step.SYNC)
    assert synced is not None
    return synced.committed_at
