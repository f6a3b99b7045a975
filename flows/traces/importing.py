"""Import of traces into a run, and following a trainer that still writes them.

The files that are found together for one step of the trainer become an iteration, with commits of `rollout`, `reward`,
`filter` and `advantage`. Its number counts the imported batches; the metric `step` is the trainer's own count. The
commit of `rollout` names what was read: `traces/<file>#<start>-<end>` in bytes, with its SHA-256, among its inputs. So
a new import of the same files goes on where the last one ended, whatever ended it.

| the import ended | the next one |
|---|---|
| before the commit of `rollout` | reads these bytes again |
| between the commits of an iteration | reads the bytes that `rollout` names, and makes the missing commits |
"""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Event

from cairn.configs.errors import BadInput
from cairn.engines.processes.fingerprint import cpu_model, installed
from cairn.flows.traces.atif import ATIF
from cairn.flows.traces.prime_rl import PRIME_RL
from cairn.flows.traces.recorded import Format, Reading, Recorded, Unreadable, record
from cairn.flows.traces.tables import FILES, SHARD, Batch
from cairn.flows.traces.trl import TRL
from cairn.flows.traces.verl import VERL
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.manifest import Imported
from cairn.storage.records import Environment, Record
from cairn.storage.store.canonical import digest, from_json
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import REQUESTS, Store

FORMATS = {one.name: one for one in (TRL, VERL, PRIME_RL, ATIF)}
POLL = 0.1
"""Seconds between two looks at the files, while following."""
SETTLED = 0.3
"""Seconds for which a file must not change before what is new in it is read."""
PATIENCE = 1.0
"""Seconds after which whole lines are read although the file still grows."""
REPORTED = 5.0
"""Seconds after which a file that does not change and cannot be read is reported."""
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
_EXPECTED = "traces are " + "; ".join(f"{one.about} ({one.name})" for one in FORMATS.values())
_INPUT = "traces/"
_RUN_OF = {"completions", "rollouts", "traces"}
"""Names of folders that do not distinguish runs."""


class CannotImport(BadInput):
    """Traces that cannot be imported as requested. The message is one clear sentence."""


class ImportedRun(Record):
    """Result of an import."""

    run: str
    format: str
    source: str
    iterations: int
    """Number of iterations that this import added."""
    samples: int
    problems: tuple[str, ...]
    """A sentence for everything that could not be read, with file and line."""


def default_run(source: Path) -> str:
    """Return the name of the run of some traces: that of their folder or file. Raises CannotImport."""
    whole = source.resolve()
    own = whole.stem if whole.is_file() else whole.name
    name = next((one for one in (own, *whole.parts[-2::-1]) if one not in _RUN_OF), "")
    if not layout.is_name(name):
        raise CannotImport(f"{name!r} is not usable as the name of a run: name it with --run NAME")
    return name


def find_format(source: Path, name: str | None) -> Format:
    """Return the format of a file or folder, by name or else by its files. Raises CannotImport."""
    if not source.exists():
        raise CannotImport(f"there is no file or folder {source}")
    if source.suffix in _PICKLES:
        raise CannotImport(f"{source} may be a pickle, which is never opened; {_EXPECTED}")
    if name is not None:
        return FORMATS[name]
    if source.is_file():
        found = _format_of_file(source)
    else:
        with _readable(source):
            found = next((one for one in FORMATS.values() if one.files(source)), None)
    if found is None:
        raise CannotImport(f"{source} has no traces of a known format; {_EXPECTED}")
    return found


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise CannotImport where the block cannot read files at the path."""
    try:
        yield
    except OSError as error:
        raise CannotImport(f"{error.filename or path} cannot be read: {error.strerror}") from None


def _format_of_file(file: Path) -> Format | None:
    by_suffix = {".parquet": TRL, ".json": ATIF}
    if file.suffix != ".jsonl":
        return by_suffix.get(file.suffix)
    with _readable(file), file.open("rb") as opened:
        for line in opened:
            try:
                first = record(from_json(line), "the line")
            except (ValueError, Unreadable):
                continue
            return PRIME_RL if {"traces", "nodes"} & first.keys() else VERL if "output" in first else None
    return None


def open_imported(store: Store, run: str, imported: Imported) -> Ledger:
    """Create the run of an import, or open it. Raises CannotImport where it is another one."""
    if not store.exists(layout.run_manifest(run)):
        config = {"model": {"path": "unknown"}, "data": {"path": imported.source}}
        lengths = {"rollout": {"rollout_batch_size": 1, "num_rollout": 1, "rollout_max_response_len": 1}}
        return Ledger.create(store, run, {**config, **lengths}, imported=imported)
    ledger = Ledger.open(store, run)
    if ledger.manifest.imported is None:
        raise CannotImport(f"run {run!r} exists and was trained here, not imported: name another one with --run NAME")
    if ledger.manifest.imported != imported:
        other = ledger.manifest.imported
        raise CannotImport(
            f"run {run!r} was imported from {other.source} ({other.described}), which differs from {imported.source} "
            f"({imported.described}): name another one with --run NAME"
        )
    return ledger


@dataclass
class _Piece:
    """Some bytes of a file, and the samples in them."""

    file: str
    start: int
    end: int
    sha256: str
    samples: list[Recorded]
    step: int | None

    @property
    def name(self) -> str:
        return f"{_INPUT}{self.file}#{self.start}-{self.end}"


@dataclass
class _Place:
    """What was read of a file, and what it looked like last."""

    end: int = 0
    lines: int = 0
    """Number of lines up to `end`."""
    state: tuple[int, int] = (0, 0)
    """Size, and time of the last change."""
    changed_at: float = 0.0
    """When `state` was first seen."""
    waiting_since: float = 0.0
    """When bytes after `end` were first seen."""
    tries: int = 0
    """How often what has not changed since was read in vain."""


class Importer:
    """Imports the files of one source. The caller holds the run's lease."""

    def __init__(
        self, ledger: Ledger, report: Callable[[str], None], problem: Callable[[str], None] = lambda sentence: None
    ) -> None:
        """`report` and `problem` are called with a sentence on each iteration, and on everything that cannot be
        read."""
        assert ledger.manifest.imported is not None
        self._ledger, self._imported = ledger, ledger.manifest.imported
        self._source = Path(self._imported.source)
        self._format = FORMATS[self._imported.format]
        self._reading = Reading(self._imported.rewards, self._note)
        self._report, self._problem = report, problem
        self._places: dict[str, _Place] = {}
        self._next_group = 0
        self._next_iteration = 0
        self.iterations = 0
        self.samples = 0
        self.problems: list[str] = []
        self._environment = Environment(
            device=cpu_model(), threads=1, host=platform.node(), versions=installed(("numpy", "pyarrow"))
        )

    def resume(self) -> None:
        """Find out what is imported already, and complete the last iteration. Raises CannotImport where the files have
        changed since."""
        last = self._ledger.last_iteration()
        self._next_iteration = 0 if last is None else last + 1
        with ThreadPoolExecutor(REQUESTS) as readers:
            numbers = range(self._next_iteration)
            for rollout in readers.map(lambda one: self._ledger.find(one, Step.ROLLOUT, SHARD), numbers):
                if rollout is None:
                    raise Damaged(f"an iteration of run {self._ledger.run!r} before {last} has no rollout commit")
                self._next_group = int(rollout.values["first_group"]) + int(rollout.values["groups"])  # type: ignore[arg-type]
                for file, start, end, sha256 in _inputs(rollout):
                    place = self._places.setdefault(file, _Place())
                    data = self._bytes(file, place.end, end)  # with lines before it that were left out
                    if data is not None and hashlib.sha256(data[start - place.end :]).hexdigest() != sha256:
                        raise CannotImport(
                            f"{self._path(file)} has changed since its bytes {start} to {end} became iteration "
                            f"{rollout.iteration} of run {self._ledger.run}: import it as another run (--run NAME)"
                        )
                    place.end = end
                    place.lines += 0 if data is None else data.count(b"\n")
        if last is not None:
            self._complete(last)

    def once(self) -> None:
        """Import everything that is there."""
        for pieces in self._batches(self._new(following=False)):
            self._commit(pieces)

    def follow(self, ended: Event) -> None:
        """Import what is there and what is written from now on, until `ended` is set."""
        while not ended.wait(POLL):
            for pieces in self._batches(self._new(following=True)):
                self._commit(pieces)

    def _files(self) -> list[Path]:
        if self._source.is_file():
            return [self._source]
        with _readable(self._source):
            found = {file for file in self._format.files(self._source) if file.is_file()}
        return sorted(found, key=lambda file: (self._step(file) or 0, str(file)))

    def _step(self, file: Path) -> int | None:
        return self._format.step(file if self._source.is_file() else file.relative_to(self._source))

    def _new(self, *, following: bool) -> Iterator[_Piece]:
        """Yield what is new in each file. While `following`, only what is whole by now."""
        for path in self._files():
            name = path.name if path == self._source else path.relative_to(self._source).as_posix()
            place = self._places.setdefault(name, _Place())
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if stat.st_size < place.end:
                raise CannotImport(f"{path} is shorter than what was read of it: import it as another run (--run NAME)")
            if stat.st_size == place.end:
                continue
            now = time.monotonic()
            state = stat.st_size, stat.st_mtime_ns
            if state != place.state:
                place.waiting_since = place.waiting_since or now
                place.state, place.changed_at, place.tries = state, now, 0
            if following and not self._is_due(place, now):
                continue
            data = self._bytes(name, place.end, None)
            if data is None:
                continue
            piece = (self._lines if self._format.by_line else self._whole)(name, data, place, following)
            if piece is not None:
                place.waiting_since = 0.0
                yield piece

    def _is_due(self, place: _Place, now: float) -> bool:
        """Whether to read a file that may still be written: what does not change is tried twice."""
        unchanged = now - place.changed_at
        if unchanged < SETTLED:
            return self._format.by_line and now - place.waiting_since >= PATIENCE
        if unchanged < (SETTLED, REPORTED, math.inf)[place.tries]:
            return False
        place.tries += 1
        return True

    def _lines(self, file: str, data: bytes, place: _Place, following: bool) -> _Piece | None:
        """Read whole lines. The last one may be half a line that is still being written: it waits for its end."""
        lines = data.split(b"\n")
        rest = lines.pop()
        samples: list[Recorded] = []
        for count, line in enumerate(lines, place.lines + 1):
            if line.strip():
                self._read_line(file, count, line, samples)
        taken = len(data) - len(rest)
        if rest.strip() and not following:
            before = len(self.problems)
            self._read_line(file, place.lines + len(lines) + 1, rest, samples, "; it waits there for the rest")
            taken += len(rest) if len(self.problems) == before else 0
        if not taken:
            return None
        start, place.end, place.lines = place.end, place.end + taken, place.lines + len(lines)
        return self._piece(file, start, data[:taken], samples) if samples else None

    def _read_line(self, file: str, number: int, line: bytes, samples: list[Recorded], hint: str = "") -> None:
        try:
            samples += self._samples_of(line)
        except (Unreadable, ValueError) as error:
            what = error if isinstance(error, Unreadable) else f"it is not JSON ({error!s:.100})"
            self._add_problem(f"{self._path(file)}, line {number} is left out: {what}{hint}")

    def _samples_of(self, line: bytes) -> list[Recorded]:
        return self._format.read(record(from_json(line.decode("utf-8-sig")), "the line"), self._reading)

    def _whole(self, file: str, data: bytes, place: _Place, following: bool) -> _Piece | None:
        if place.end:
            raise CannotImport(f"{self._path(file)} has grown since it was read: import it as another run (--run NAME)")
        try:
            samples = self._format.read(data, self._reading)
        except (Unreadable, ValueError) as error:
            if not following or place.tries > 1:
                self._add_problem(f"{self._path(file)} is left out: {error!s:.300}")
            return None
        place.end = len(data)
        return self._piece(file, 0, data, samples) if samples else None

    def _piece(self, file: str, start: int, data: bytes, samples: list[Recorded]) -> _Piece:
        step = self._step(self._path(file))
        step = next((one.step for one in samples if one.step is not None), None) if step is None else step
        return _Piece(file, start, start + len(data), hashlib.sha256(data).hexdigest(), samples, step)

    def _batches(self, pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
        """Yield the pieces of each iteration: those of one step."""
        if self._format.one_batch:
            together = list(pieces)
            yield from [together] if together else []
            return
        for _, own in groupby(pieces, lambda piece: piece.file if piece.step is None else piece.step):
            yield list(own)

    def _commit(self, pieces: Sequence[_Piece]) -> None:
        """Make an iteration of some pieces."""
        samples = [sample for piece in pieces for sample in piece.samples]
        batch = Batch(samples, self._next_iteration, self._next_group)
        self._next_iteration += 1
        self._next_group += len(batch.groups)
        self._commit_steps(batch, {piece.name: piece.sha256 for piece in pieces}, {})
        self.iterations += 1
        self.samples += len(batch.samples)
        metrics = batch.metrics()
        step = metrics[Step.ROLLOUT].get("step")
        reward = metrics[Step.FILTER].get("raw_reward")
        self._report(
            f"iteration {batch.iteration}"
            + ("" if step is None else f"  step {step:.0f}")
            + ("" if reward is None else f"  reward {reward:.3f}")
            + f"  {len(batch.samples)} samples of {len(batch.groups)} prompts"
        )

    def _complete(self, iteration: int) -> None:
        """Make the commits that the last iteration lacks."""
        made = {commit.step: commit for commit in self._ledger.commits(iteration)}
        if made.keys() >= FILES.keys():
            return
        rollout = made[Step.ROLLOUT]
        samples: list[Recorded] = []
        for file, start, end, _ in _inputs(rollout):
            data = self._bytes(file, start, end)
            if data is None:
                raise CannotImport(
                    f"{self._path(file)} is gone, and iteration {iteration} of run {self._ledger.run} was not imported "
                    "whole: put it back, or import the others as another run (--run NAME)"
                )
            if not self._format.by_line:
                samples += self._format.read(data, self._reading)
                continue
            for line in filter(bytes.strip, data.split(b"\n")):
                with suppress(Unreadable, ValueError):  # reported when the rollout was committed
                    samples += self._samples_of(line)
        batch = Batch(samples, iteration, int(rollout.values["first_group"]))  # type: ignore[arg-type]
        self._commit_steps(batch, {}, made)

    def _commit_steps(self, batch: Batch, inputs: Mapping[str, str], made: Mapping[Step, Commit]) -> None:
        done, metrics = dict(made), batch.metrics()
        values: dict[Step, dict[str, int | bool | None]] = {
            Step.ROLLOUT: {"first_group": min(batch.groups), "groups": len(batch.groups)},
            Step.FILTER: {
                "full": True,
                "missing": 0,
                "cursor": 0,
                "round": 0,
                "buffered": 0,
                "unfinished": 0,
                "max_age": None,
            },
        }
        reads: dict[Step, tuple[Step, ...]] = {
            Step.REWARD: (Step.ROLLOUT,),
            Step.FILTER: (Step.ROLLOUT, Step.REWARD),
            Step.ADVANTAGE: (Step.FILTER, Step.ROLLOUT, Step.REWARD),
        }
        for step, table in batch.tables().items():
            if step in done:
                continue
            started = time.time()
            shard = {Step.ROLLOUT: SHARD, Step.REWARD: SHARD, Step.FILTER: SHARD.partition("-")[0]}.get(step)
            attempt = self._ledger.attempt(batch.iteration, step, shard)
            with attempt.discarded_on_failure():
                output = attempt.write_table(FILES[step], table)
                done[step] = self._ledger.commit(
                    iteration=batch.iteration,
                    step=step,
                    shard=shard,
                    attempt=attempt,
                    inputs={done[one].name: done[one].digest for one in reads.get(step, ())} or inputs,
                    config_digest=digest(self._imported.model_dump(mode="json")),
                    environment=self._environment,
                    started_at=started,
                    outputs=[output],
                    values=values.get(step),
                    metrics=metrics[step],
                )

    def _path(self, file: str) -> Path:
        return self._source if self._source.is_file() else self._source / file

    def _bytes(self, file: str, start: int, end: int | None) -> bytes | None:
        """Return bytes of a file; None where it is gone."""
        path = self._path(file)
        with _readable(path):
            try:
                with path.open("rb") as opened:
                    opened.seek(start)
                    return opened.read() if end is None else opened.read(end - start)
            except FileNotFoundError:
                return None

    def _note(self, sentence: str) -> None:
        if sentence not in self.problems:
            self._add_problem(sentence)

    def _add_problem(self, sentence: str) -> None:
        self.problems.append(sentence)
        self._problem(sentence)


def _inputs(rollout: Commit) -> Iterator[tuple[str, int, int, str]]:
    """Yield (file, start, end, SHA-256) of all that an imported rollout was read from."""
    for name, sha256 in rollout.inputs.items():
        file, _, span = name.removeprefix(_INPUT).rpartition("#")
        start, _, end = span.partition("-")
        yield file, int(start), int(end), sha256
