"""Records: files that hold the commits of many shards.

A round of 256 shards makes 512 commits of rollout and reward. Commits that are ready at one time share a record, which
is created exclusively and never rewritten:

```
runs/<run>/iterations/000042/shards.000000.json   commits of rollout.00-000, rollout.00-003, …
runs/<run>/iterations/000042/shards.000001.json   commits of rollout.00-001, reward.00-000, …
```

The records of an iteration are numbered without gaps. Whoever creates number n has read all before it, so a shard has
one commit: a driver that finds number n taken reads it, adopts its commits, and tries number n + 1 with the rest of its
own. Each commit has its own name, inputs and digest, as in a file of its own. Earlier versions gave every commit such a
file; these stay valid, also within one iteration. Of a record and such a file with the same commit, the record counts.

Every fourth record repeats the commits of the three before it, every 16th those of the 15 before it, and so on, as long
as they fit, in a field of its own, with the numbers of their records. So a reader of n records needs few of them (at
most 3 for each power of 4), a commit is written at most once more for each power of 4, and its place is always the
record that had it first. Versions that repeat nothing read every record, and pass over that field.

A commit waits for its record until

- all shards of the iteration that run are waiting too, or
- the last record is `PACE` seconds old for each shard that runs, at most `LONGEST_WAIT`.

So it waits for a few milliseconds where few shards run. No step starts from a commit before its record is durable. A
driver that dies while commits wait leaves finished samples in write-ahead parts, as for any shard that has not ended,
and its successor generates none of them again. The grades that were waiting, of `LONGEST_WAIT` seconds at most, are
made again, without a second question to a service whose answers are stored.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import FORMAT, Commit, Step, unsealed_fields
from cairn.storage.ledger.snapshots import AttemptFolder, discard_superseded
from cairn.storage.records import Environment
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, StoreError, naming_damaged
from cairn.storage.store.store import Store

SHARED = frozenset({Step.ROLLOUT, Step.REWARD})
"""Steps whose shards share records."""
PACE, LONGEST_WAIT = 0.005, 1.0
"""Seconds between two records: `PACE` for each shard that runs, at most `LONGEST_WAIT`."""
_FULL = 4 * 2**20
"""Greatest number of bytes of a record with several commits. A marker on an object store has at most 5 MiB."""
_SPAN = 4
"""Record n has the commits of as many records, itself the last, as the greatest power of this that divides n + 1."""
_KEPT = 8
"""Iterations whose records stay in memory."""


def repeated_from(number: int) -> int:
    """Return the number of the first record whose commits the record with this number repeats; its own number if it
    repeats none."""
    count, width = number + 1, 1
    while count % (width * _SPAN) == 0:
        width *= _SPAN
    return count - width


def record_bytes(commits: Sequence[Commit], repeated: Sequence[Commit] = ()) -> bytes:
    """Return the content of a record of commits of one iteration. Equal environments are stored once.

    `repeated`: commits of the records before, as far back as `repeated_from` says.
    """
    environments: dict[str, Any] = {}

    def listed(commit: Commit) -> dict[str, Any]:
        fields = commit.as_fields()
        name = canonical.digest(fields["environment"])
        environments[name] = fields["environment"]
        return {**fields, "environment": name, "digest": commit.digest}

    lists = {"commits": list(map(listed, commits))}
    if repeated:
        lists["repeated"] = [{**listed(one), "record": _number_of(one)} for one in repeated]
    return canonical.seal({"schema_version": FORMAT, "environments": environments, **lists})


def commits_of_record(fields: Mapping[str, Any], listed: str = "commits") -> list[dict[str, Any]]:
    """Return the fields of each commit of a record, with its digest. Raises ValueError if the fields are no record's.

    Commits with equal environments have one and the same object. `listed`: "repeated" for those of the records before
    that it repeats.
    """
    try:
        environments, commits = fields["environments"], fields[listed]
        return [{**one, "environment": environments[one["environment"]]} for one in commits]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no record of commits: {error!r}") from None


def read_commits(data: bytes, path: str) -> list[Commit]:
    """Return the commits in a file of an iteration: a commit of its own, or a record. Those that a record repeats come
    first, with the paths of the records that had them first.

    Raises Damaged, naming `path`, unless `data` are the bytes that were committed at `path`.
    """
    folder, _, name = path.rpartition("/")
    number = layout.parse_record(name)
    if number is None:
        return [Commit.from_bytes(data, path)]
    environments: dict[int, Environment] = {}
    commits: list[Commit] = []
    with naming_damaged(f"record {path}"):
        whole = unsealed_fields(data)
        first = repeated_from(number) if whole.get("repeated") else number
        repeated = commits_of_record(whole, "repeated") if first < number else []
        if {str(one.get("record")) for one in repeated} != set(map(str, range(first, number))):
            raise ValueError(f"it does not repeat all records from number {first} on")
        for fields in [*repeated, *commits_of_record(whole)]:
            own, digest = fields["environment"], fields.pop("digest", None)
            record = f"{folder}/{layout.record_name(fields.pop('record', number))}"
            # Thousands of commits may be in memory.
            shared = environments.setdefault(id(own), Environment.model_validate(own))
            commits.append(Commit.model_validate({**fields, "environment": shared}).within(record))
            if commits[-1].digest != digest:
                raise ValueError(f"{commits[-1].name} has another digest than it records")
    for commit in commits:
        if commit.step not in SHARED or folder != layout.iteration(commit.run, commit.iteration):
            raise Damaged(f"record {path} is in the wrong place: it names {commit.name} of run {commit.run}")
    return commits


def _number_of(commit: Commit) -> int:
    number = layout.parse_record(commit.path.rpartition("/")[2])
    assert number is not None
    return number


class Records:
    """The records of one iteration, as far as they were read. Thread-safe."""

    def __init__(self, store: Store, run: str, iteration: int) -> None:
        self._store, self._run, self._iteration = store, run, iteration
        self._lock = threading.RLock()
        self._commits: dict[tuple[Step, str | None], Commit] = {}
        self._number = 0
        self.looked = False
        """Whether the owner of the run has looked for records since it owns the run."""
        self.has_others = False
        """Whether commits of shards may be in files of their own."""
        self.recorder = Recorder(self.create)

    def find(self, step: Step, shard: str | None, *, owned: bool) -> Commit | None:
        """Return a commit, or None. Makes requests if it has not been read: for each new record, and one more.

        Args:
            owned: whether only this process makes records. Then they are read once, with one listing.
        """
        with self._lock:
            commit = self._commits.get((step, shard))
            if commit is None and not (owned and self.looked):
                if owned:
                    self.look(self._store.list(layout.iteration(self._run, self._iteration)))
                else:
                    self.read_on()
                commit = self._commits.get((step, shard))
            return commit

    def look(self, names: Sequence[str]) -> None:
        """Read all records. `names`: what this process, which owns the run, has listed in the iteration's folder."""
        with self._lock:
            numbers = [number for name in names if (number := layout.parse_record(name)) is not None]
            # An earlier version may have run shards here: their attempts are listed, and soon their commits.
            others = [name for name in names if name.startswith(tuple(SHARED))]
            self.has_others |= any(not name.endswith("/") for name in others) or (bool(others) and not numbers)
            self.all(numbers)
            self.read_on()
            self.looked = True

    def has_records_only(self, *, owned: bool) -> bool:
        """Return whether no shard had a commit in a file of its own, or could have, when this process, which alone
        makes commits, first looked."""
        return owned and self.looked and not self.has_others

    def all(self, listed: Sequence[int]) -> list[Commit]:
        """Return the commits of the records with these numbers, of all between them and of those read before.

        Reads no record that another one repeats. Requests are parallel.
        """
        with self._lock:
            first, last = self._number, max(listed, default=-1)
            few, number = [], last
            while number >= first:
                few.append(number)
                number = repeated_from(number) - 1
            held = self._read_all(few)
            # Those of earlier versions repeat none, and neither do the largest.
            self._read_all([n for number, own in held.items() for n in range(max(repeated_from(number), first), own)])
            self._number = max(first, last + 1)
            return list(self._commits.values())

    def _read_all(self, numbers: Sequence[int]) -> dict[int, int]:
        """Read records. Return for each the number of the first one whose commits it has."""
        paths, held = list(map(self._path, numbers)), {}
        for number, path, data in zip(numbers, paths, self._store.read_many(paths), strict=True):
            if data is None:
                raise Damaged(f"{path} is missing, although later records exist")
            held[number] = self._add(number, path, data)
        return held

    def read_on(self) -> bool:
        """Read the records after those that were read. Return whether there are any."""
        with self._lock:
            before = self._number
            while True:
                path = self._path(self._number)
                try:
                    data = self._store.read(path)
                except FileNotFoundError:
                    return self._number > before
                self._add(self._number, path, data)
                self._number += 1

    def create(self, commits: Sequence[Commit], guard: Callable[[], None]) -> list[Commit]:
        """Record the commits that no record holds. Return the commits that the ledger now has, in the same order.

        Raises StoreError, and what `guard` raises, which is called right before each try.
        """
        with self._lock:
            try:
                while new := [one for one in commits if (one.step, one.shard) not in self._commits]:
                    path = self._path(self._number)
                    placed = [one.within(path) for one in new]
                    data = record_bytes(placed, self._to_repeat())
                    if len(data) > _FULL:
                        data = record_bytes(placed)
                    while len(data) > _FULL and len(placed) > 1:
                        placed = placed[: len(placed) // 2]
                        data = record_bytes(placed)
                    if self._store.create(path, data, guard):
                        self._commits |= {(one.step, one.shard): one for one in placed}
                        self._number += 1
                    elif not self.read_on():
                        raise StoreError(f"{path} could not be created, but it does not exist either")
            except BaseException:
                self.looked = False  # the record may have been created all the same
                raise
            return [self._commits[one.step, one.shard] for one in commits]

    def _to_repeat(self) -> list[Commit]:
        """Return the commits that the next record repeats, if it has room."""
        numbers = range(repeated_from(self._number), self._number)
        commits = [one for one in self._commits.values() if numbers and one.path >= self._path(numbers[0])]
        return commits if set(map(_number_of, commits)) == set(numbers) else []

    def _add(self, number: int, path: str, data: bytes) -> int:
        """Add the commits of a record. Return the number of the first one whose commits it has."""
        commits = read_commits(data, path)
        for commit in commits:
            self._commits.setdefault((commit.step, commit.shard), commit)
        return min(map(_number_of, commits), default=number)

    def _path(self, number: int) -> str:
        return layout.record(self._run, self._iteration, number)


class RecentRecords:
    """The records of the iterations that were asked for last. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._records: OrderedDict[tuple[str, int], Records] = OrderedDict()

    def look_again(self) -> None:
        """Look for new records before an owner says that there are none: this process owns the run from now on."""
        with self._lock:
            for records in self._records.values():
                records.looked = False

    def of(self, run: str, iteration: int) -> Records:
        """Return the records of an iteration of a run."""
        with self._lock:
            records = self._records.setdefault((run, iteration), Records(self._store, run, iteration))
            self._records.move_to_end((run, iteration))
            idle = [place for place, one in self._records.items() if not one.recorder.busy]
            for place in idle[: max(0, len(self._records) - _KEPT)]:
                del self._records[place]
            return records


class _Waiting:
    """A commit that waits for its record."""

    def __init__(self, commit: Commit, attempt: AttemptFolder) -> None:
        self.commit = commit
        self.attempt = attempt
        self.woken = threading.Event()
        self.done = False
        self.error: BaseException | None = None


class Recorder:
    """Brings the commits of one iteration's shards into records. Thread-safe.

    Of the threads that wait, the first one writes; the others sleep.
    """

    def __init__(self, create: Callable[[Sequence[Commit], Callable[[], None]], Sequence[Commit]]) -> None:
        """`create` records commits, with a guard, and returns those that the ledger then has (`Records.create`)."""
        self._create = create
        self._changed = threading.Condition()
        self._running = 0
        self._waiting: list[_Waiting] = []
        self._led = False
        """Whether one of the waiting threads writes."""
        self._last = float("-inf")
        """Time of the last record by the monotonic clock."""

    @property
    def busy(self) -> bool:
        """Whether a shard runs."""
        return self._running > 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a shard as running while the block runs: other commits may wait for its own."""
        with self._changed:
            self._running += 1
        try:
            yield
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()

    def commit(self, commit: Commit, attempt: AttemptFolder, guard: Callable[[], None]) -> Commit:
        """Return the commit that the ledger has once a record holds it. Raises as `Records.create`.

        Args:
            attempt: whose write-ahead parts are then deleted.
            guard: called right before each try at a record.
        """
        own = _Waiting(commit, attempt)
        with self._changed:
            self._waiting.append(own)
            leads, self._led = not self._led, True
            self._changed.notify()
        if not leads:
            own.woken.wait()
        if not own.done:
            self._lead(own, guard)
        if own.error is not None:
            raise own.error
        return own.commit

    def _lead(self, own: _Waiting, guard: Callable[[], None]) -> None:
        """Write a record. Then one of the threads that still wait writes the next."""
        batch = [own]
        try:
            with self._changed:
                self._changed.wait_for(lambda: len(self._waiting) >= self._running, self._delay())
                batch, self._waiting = self._waiting, []
                self._last = time.monotonic()
            for one, commit in zip(batch, self._create([one.commit for one in batch], guard), strict=True):
                one.commit = commit
            discard_superseded(one.attempt for one in batch)
        except BaseException as error:
            for one in batch:
                one.error = error
        with self._changed:
            self._waiting = [one for one in self._waiting if one not in batch]
            self._led = bool(self._waiting)
            successor = self._waiting[:1]
        for one in batch:
            one.done = True
        for one in [*batch, *successor]:
            one.woken.set()

    def _delay(self) -> float:
        pace = min(LONGEST_WAIT, PACE * self._running)
        return max(0.0, self._last + pace - time.monotonic())
