"""TensorBoard's event files.

```
<tracking.tensorboard_dir>/<run>/events.out.tfevents.…    one file for each driver, appended to after each iteration
```
"""

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.scalar.summary import scalar_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from cairn.configs.errors import ConfigError
from cairn.flows.watching.trackers.tracker import Written
from cairn.storage.store.errors import naming_full


def board(folder: str, run: str) -> Callable[[], "EventFiles"]:
    """Return a function that opens the run's event files. Raises ConfigError if their folder cannot be created."""
    files = Path(folder) / run
    try:
        files.mkdir(parents=True, exist_ok=True)
        if not os.access(files, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(files))
    except OSError as error:
        raise ConfigError(
            [f"tracking.tensorboard_dir cannot be written ({error}); set another folder, or null for none"]
        ) from None
    return lambda: EventFiles(files)


class EventFiles:
    """The board of one run in TensorBoard."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written = written(folder)
        with naming_full(folder):
            self._writer = EventFileWriter(str(folder))

    def written(self) -> Written:
        return self._written

    def write(self, step: int, metrics: Mapping[str, float], wall_time: float, *, is_evaluation: bool) -> None:
        summary = Summary()
        for name, value in sorted(metrics.items()):
            summary.MergeFrom(scalar_pb(name, value))
        with naming_full(self._folder):
            self._writer.add_event(Event(wall_time=wall_time, step=step, summary=summary))

    def flush(self) -> None:
        with naming_full(self._folder):
            self._writer.flush()

    def close(self, *, completed: bool) -> None:
        with naming_full(self._folder):
            self._writer.close()


def written(folder: Path) -> Written:
    """Return the points in the folder's event files. A truncated end is skipped."""
    points = Written()
    for file in folder.glob("events.out.tfevents.*"):
        for record in RawEventFileLoader(str(file)).Load():
            event = Event.FromString(record)
            if event.summary.value:
                is_evaluation = event.summary.value[0].tag.startswith("eval/")
                (points.evaluations if is_evaluation else points.iterations).add(event.step)
    return points
