"""Weights & Biases: one W&B run for each run, resumed by every driver.

```
<tracking.wandb_dir>/wandb/offline-run-<time>-<id>/run-<id>.wandb    one for each driver, where the mode is offline
```

The id is derived from the run's own, so that a new driver finds the W&B run. A W&B run accepts rows with increasing
steps: the steps on the server, or in the files of the folder, show which points exist. Rows of an iteration get three
consecutive steps, in the order in which a tracker writes them:

    3i       evaluation of the initial weights, of iteration 0 alone
    3i + 1   evaluation after iteration i
    3i + 2   iteration i

The axes in W&B's UI are `iteration` and, for evaluations, `trained`.
"""

import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from cairn.configs.schema.run import RunConfig
from cairn.flows.watching.trackers.tracker import Written
from cairn.storage.ledger.ledger import Ledger

# Reader for W&B's offline files, only for the steps that they contain; the library has no reader of its own.
#
# A file is a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md) after seven bytes
# of W&B's, with the CRC-32 of zlib; its records are protocol buffers that the library declares.


_BEGIN = b":W&B\xe1\xbe\x00"
_BLOCK = 32768
_HEADER = struct.Struct("<IHB")
"""Checksum of type and data, number of bytes of data, type."""
_FULL, _FIRST, _LAST = 1, 2, 4


def history_steps(file: Path) -> Iterator[int]:
    """Yield the steps of the rows in a file. A truncated end is skipped."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # chosen by protobuf's version

    for record in records(file.read_bytes()):
        history = Record.FromString(record).history
        if history.item:
            yield history.step.num


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log, up to the first truncated or altered piece."""
    if not data.startswith(_BEGIN):
        return
    place, record = len(_BEGIN), b""
    while place + _HEADER.size <= len(data):
        remaining = _BLOCK - place % _BLOCK
        if remaining < _HEADER.size:  # no piece begins there
            place += remaining
            continue
        checksum, size, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        piece = data[place : place + size]
        if len(piece) < size or zlib.crc32(piece, zlib.crc32(bytes([kind]))) != checksum:
            return
        place += size
        record = piece if kind in (_FULL, _FIRST) else record + piece
        if kind in (_FULL, _LAST):
            yield record


_ITERATION_PREFIXES = ("rollout", "train", "perf", "age", "retries", "recovery", "alarm")
"""Prefixes of metric names of iterations."""


def run_id(ledger: Ledger) -> str:
    """Return the id of the W&B run."""
    return f"cairn-{ledger.manifest.identity[:16]}"


class WandbRun:
    """The board of one run in W&B. Opening it may take seconds."""

    def __init__(self, ledger: Ledger, config: RunConfig) -> None:
        import wandb

        tracking = config.tracking
        remove_empty_runs(Path(tracking.wandb_dir), run_id(ledger))
        self._written = offline_points(Path(tracking.wandb_dir), run_id(ledger))
        settings = wandb.Settings(console="off", silent=True, disable_git=True, save_code=False)
        if tracking.wandb_host is not None:
            settings.base_url = tracking.wandb_host
        Path(tracking.wandb_dir).mkdir(parents=True, exist_ok=True)
        self._run: wandb.Run = wandb.init(
            entity=tracking.wandb_team,
            project=tracking.wandb_project,
            group=tracking.wandb_group,
            name=ledger.run,
            id=run_id(ledger),
            resume="allow",
            reinit="create_new",
            mode=tracking.wandb_mode,
            dir=tracking.wandb_dir,
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        if tracking.wandb_mode == "online":
            self._written = points_before(self._run.starting_step)
        for prefix in _ITERATION_PREFIXES:
            self._run.define_metric(f"{prefix}/*", step_metric="iteration")
        self._run.define_metric("eval/*", step_metric="trained")

    def written(self) -> Written:
        return self._written

    def write(self, step: int, metrics: Mapping[str, float], wall_time: float, *, is_evaluation: bool) -> None:
        axis = "trained" if is_evaluation else "iteration"
        row = {**metrics, axis: step, "_timestamp": wall_time}
        self._run.log(row, step=_row(step, is_evaluation), commit=True)

    def flush(self) -> None:
        """Do nothing: rows are sent asynchronously. If a kill loses some, the next driver writes them again."""

    def close(self, *, completed: bool) -> None:
        self._run.finish(exit_code=0 if completed else 1)


def remove_empty_runs(folder: Path, run: str) -> None:
    """Delete folders of drivers that were killed before W&B wrote anything: `wandb sync` fails on a file without
    records, and uploads none of the run's others."""
    for file in _files(folder, run):
        if next(records(file.read_bytes()), None) is None:
            shutil.rmtree(file.parent, ignore_errors=True)


def offline_points(folder: Path, run: str) -> Written:
    """Return the points in the folder's files of the W&B run."""
    return _points({step for file in _files(folder, run) for step in history_steps(file)})


def points_before(step: int) -> Written:
    """Return the points of a W&B run whose next row is `step`: it accepts no lower ones."""
    return _points(set(range(step)))


def _files(folder: Path, run: str) -> list[Path]:
    return sorted(folder.glob(f"wandb/offline-run-*-{run}/*.wandb"))


def _row(step: int, is_evaluation: bool) -> int:
    if not is_evaluation:
        return 3 * step + 2
    return 3 * step - 2 if step else 0


def _points(rows: set[int]) -> Written:
    iterations = {row // 3 for row in rows if row % 3 == 2}
    evaluations = {row // 3 + 1 for row in rows if row % 3 == 1} | ({0} & rows)
    return Written(iterations, evaluations)
