"""A driver one of whose machine's places fills up as a step begins:

    python -m tests.chaos.events.crowded STORE RUN CONFIG_FILE PLACE FOLDER ITERATION STEP STAYS

PLACE is `memory` (/dev/shm), `objects` (Ray's object store, and the disk that it spills to) or `folder` (the disk of
FOLDER). What fills it goes when a step is granted a new try, unless STAYS is `stays`. Each is told on standard output.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import ray

import cairn.engines.fleet.fleet
from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import ray_folder
from cairn.engines.fleet.object_store import FULL
from cairn.flows.cli.app import describe, exit_code
from cairn.flows.events import Event
from cairn.flows.train import start
from cairn.storage.ledger.commits import Step
from cairn.storage.opening import open_for_runs
from cairn.tasks.durable.events import StepStarted
from cairn.tasks.durable.retries import Place, RetryTally, error_class
from tests.small_disk import fill

OBJECT_STORE = 80 * 2**20
"""Bytes; Ray wants 75 MiB at least."""


class Crowd:
    """What takes all the room of a place, until it leaves."""

    def __init__(self, place: str, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._objects: list[object] = []
        self._ballast: Path | None = None

    def gather(self) -> None:
        if self._place == "objects":
            self._folder = ray_folder() or self._folder
        elif self._place == "memory":
            self._folder = Path("/dev/shm")
        self._ballast = fill(self._folder)
        if self._place == "objects":
            for size in (2**22, 2**16, 2**10):
                try:
                    while True:
                        self._objects.append(ray.put(np.ones(size, np.uint8)))
                except FULL:
                    pass
        print(f"full: {self._place}", flush=True)

    def leave(self) -> None:
        if self._ballast is not None:
            self._ballast.unlink()
            self._objects.clear()
            self._ballast = None
            print(f"left: {self._place}", flush=True)


def leaving_at_a_new_try(crowd: Crowd) -> None:
    """Make room when a step has met the crowd and is granted a new try."""
    ask: Callable[[RetryTally, Place, Exception], bool] = RetryTally.ask

    def asking(tally: RetryTally, place: Place, error: Exception) -> bool:
        granted = ask(tally, place, error)
        print(f"{place[1]} failed ({error_class(error)}): {error}", flush=True)
        if granted:
            crowd.leave()
        return granted

    RetryTally.ask = asking  # type: ignore[method-assign]


def main(store: str, run: str, config: str, place: str, folder: str, iteration: str, step: str, stays: str) -> None:
    cairn.engines.fleet.fleet.LEAST_OBJECT_STORE = OBJECT_STORE
    crowd = Crowd(place, Path(folder))
    waiting = [(int(iteration), Step(step))]

    def on_event(event: Event) -> None:
        if isinstance(event, StepStarted) and (event.iteration, event.step) in waiting:
            waiting.clear()
            crowd.gather()

    if stays != "stays":
        leaving_at_a_new_try(crowd)
    try:
        start(open_for_runs(store), run, RunConfig.model_validate_json(Path(config).read_text()), on_event=on_event)
    except Exception as error:  # as the command line ends
        code = exit_code(error)
        if code is None:
            raise
        print(describe(error), file=sys.stderr)
        sys.exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
