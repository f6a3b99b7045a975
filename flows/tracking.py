"""TensorBoard: a view of the ledger in event files.

```
<tracking.tensorboard_dir>/<run>/events.out.tfevents.…    one file a driver, appended to when an iteration is done
```

An iteration is one event, an evaluation another. A driver first reads which of them the folder has and writes those
that are missing, whoever ran them: after a kill nothing is doubled and nothing is lost, and a folder that was deleted
comes back whole. All of it is done beside the run, in the order of the iterations: the run waits for none of it.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event as TensorBoardEvent
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cairn.configs.errors import ConfigError
from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Event, IterationDone, OnEvent, RunStarted
from cairn.flows.metrics import eval_metrics, iteration_metrics
from cairn.storage.commits import Commit
from cairn.storage.ledger import Ledger
from cairn.storage.space import naming_full


@contextmanager
def tracked(ledger: Ledger, config: RunConfig) -> Iterator[OnEvent]:
    """Write the run's metrics as `tracking` says while the block feeds the driver's events to what is yielded.

    Raises ConfigError if the folder cannot be written, and NoSpace at the end if something found no room there: the
    next driver writes that.
    """
    if config.tracking.tensorboard_dir is None:
        yield lambda event: None
        return
    folder = Path(config.tracking.tensorboard_dir) / ledger.run
    try:
        board = TensorBoard(folder, ledger, config)
    except OSError as error:
        raise ConfigError(
            [f"tracking.tensorboard_dir cannot be written ({error}); name another folder, or null for none"]
        ) from None
    try:
        yield board
    except BaseException:
        board.stop()
        raise
    with naming_full(folder):
        board.close()


class TensorBoard:
    """The event files of one run. Takes the driver's events."""

    def __init__(self, folder: Path, ledger: Ledger, config: RunConfig) -> None:
        self._ledger = ledger
        self._config = config
        self._iterations, self._evaluations = written_steps(folder)
        self._writer = EventFileWriter(str(folder))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tensorboard")
        self._jobs: list[Future[None]] = []
        self._stopped = threading.Event()

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._jobs.append(self._worker.submit(self._catch_up, event.iteration))
        elif isinstance(event, IterationDone):
            self._jobs.append(self._worker.submit(self._add, event.iteration, event.commits))

    def close(self) -> None:
        """Write what is left and end the file. Raises what writing raised, such as Damaged."""
        self._worker.shutdown()
        self._writer.close()
        for job in self._jobs:
            job.result()

    def stop(self) -> None:
        """End the file as it is: the next driver writes what is missing."""
        self._stopped.set()
        self._worker.shutdown(cancel_futures=True)
        with suppress(OSError):  # what ended the run is what its caller must hear of
            self._writer.close()

    def _catch_up(self, until: int) -> None:
        """Write the iterations before `until` that the folder lacks."""
        for iteration in range(until):
            if self._stopped.is_set():
                return
            if iteration not in self._iterations:
                self._add(iteration, self._ledger.commits(iteration))

    def _add(self, iteration: int, commits: Iterable[Commit]) -> None:
        self._ledger.require_held()  # or the next driver has looked what is missing, and writes it
        commits = list(commits)
        wall_time = max(commit.committed_at for commit in commits)
        for trained, metrics in eval_metrics(commits).items():
            if trained not in self._evaluations:
                self._write(trained, metrics, wall_time)
                self._evaluations.add(trained)
        if iteration not in self._iterations:
            self._write(iteration, iteration_metrics(commits, self._config), wall_time)
            self._iterations.add(iteration)
        self._writer.flush()

    def _write(self, step: int, metrics: Mapping[str, float], wall_time: float) -> None:
        summary = Summary()
        for name, value in sorted(metrics.items()):
            summary.MergeFrom(scalar_pb(name, value))
        self._writer.add_event(TensorBoardEvent(wall_time=wall_time, step=step, summary=summary))


def written_steps(folder: Path) -> tuple[set[int], set[int]]:
    """Steps of the iterations and of the evaluations that the folder's event files hold. A torn end is passed over."""
    iterations: set[int] = set()
    evaluations: set[int] = set()
    for file in folder.glob("events.out.tfevents.*"):
        for record in RawEventFileLoader(str(file)).Load():
            event = TensorBoardEvent.FromString(record)
            if event.summary.value:
                is_evaluation = event.summary.value[0].tag.startswith("eval/")
                (evaluations if is_evaluation else iterations).add(event.step)
    return iterations, evaluations
