"""Faults and the moments at which they strike: a driver process brings them upon itself or upon its actors.

moment        when                                                          what the ledger holds then
before        the step is about to do work                                  nothing of the step
during        a few milliseconds into the step's work                       nothing, or parts without a commit
uncommitted   the step's files are written, its commit is about to be made  files without a commit
after         the commit is there                                           the step

Every fault writes a witness before it strikes, so that a run without a fault cannot pass for one that survived it.
"""

import json
import os
import signal
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from flows.events import Event
from storage.commits import Commit, Step
from storage.ledger import Ledger
from tasks.events import StepCommitted, StepStarted

Moment = Literal["before", "during", "uncommitted", "after"]
Victim = Literal["driver", "training", "rollout"]

INTO_THE_WORK = 0.01
"""Seconds between a step's start and the fault during it."""

ACTORS = {"training": "ray::TrainingActor", "rollout": "ray::RolloutActor"}


@dataclass(frozen=True)
class Fault:
    """Kill `victim` once, at `moment` of the first shard of `step` in `iteration`."""

    iteration: int
    step: Step
    moment: Moment
    victim: Victim = "driver"

    def __str__(self) -> str:
        return f"{self.victim} killed {self.moment} {self.step} of iteration {self.iteration}"


class Striker:
    """Watches one driver's events and strikes when a fault's moment has come, each fault once."""

    def __init__(self, faults: list[Fault], witness: Path) -> None:
        self._pending = list(faults)
        self._witness = witness
        self._lock = threading.Lock()
        commit = Ledger.commit

        def committing(ledger: Ledger, **fields: Any) -> Commit:
            self._strike(fields["iteration"], fields["step"], "uncommitted")
            return commit(ledger, **fields)

        Ledger.commit = committing  # type: ignore[method-assign]

    def __call__(self, event: Event) -> None:
        """To be given to `flows.train.start`."""
        if isinstance(event, StepStarted):
            self._strike(event.iteration, event.step, "before")
            threading.Timer(INTO_THE_WORK, self._strike, (event.iteration, event.step, "during")).start()
        elif isinstance(event, StepCommitted) and not event.adopted:
            self._strike(event.commit.iteration, event.commit.step, "after")

    def _strike(self, iteration: int, step: Step, moment: Moment) -> None:
        with self._lock:
            for fault in self._pending:
                if (fault.iteration, fault.step, fault.moment) == (iteration, step, moment):
                    self._pending.remove(fault)
                    break
            else:
                return
        pids = [os.getpid()] if fault.victim == "driver" else _actors(ACTORS[fault.victim])[:1]
        with self._witness.open("a") as file:
            file.write(json.dumps({**asdict(fault), "pids": pids, "at": time.time()}) + "\n")
            file.flush()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def _actors(title: str) -> list[int]:
    below = psutil.Process().children(recursive=True)
    return sorted(process.pid for process in below if process.cmdline() and process.cmdline()[0].startswith(title))
