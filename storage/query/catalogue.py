"""Which commits and tables each run of a store has, a fork those that it shares with its parent besides its own."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage import layout
from cairn.storage.commits import Step
from cairn.storage.decisions import Decisions, redacted_files
from cairn.storage.errors import BeingDeleted, Damaged
from cairn.storage.iterations import iterations_with_files
from cairn.storage.ledger import Ledger
from cairn.storage.local import LocalStore
from cairn.storage.manifest import Manifest, list_runs, read_manifest
from cairn.storage.query.index import read_index, write_index
from cairn.storage.query.rows import COMMITS, row_of, table_of
from cairn.storage.store import Store


@dataclass(frozen=True)
class Share:
    """What a run has of the run that made it: itself, or a parent."""

    run: str
    owner: str
    first: int
    last: int
    """Iterations, both included."""
    steps: frozenset[str] = frozenset(Step)
    """A fork may hold checkpoints of its own of iterations that it shares."""


@dataclass(frozen=True)
class Tables:
    """The Parquet files of a step that a run has of a share."""

    share: Share
    paths: tuple[str, ...]
    """Store paths, in the order of iterations and shards."""
    sizes: tuple[int, ...]
    """Their bytes."""
    rows: tuple[int, ...]
    """Of each step's snapshot."""
    places: tuple[tuple[int, str | None], ...]
    """Iteration and shard of each."""


class Catalogue:
    """What lies in a store now. Reads what is asked for, once: make a new one to see what was committed since."""

    def __init__(self, store: Store, run: str | None = None):
        """`run`: only that run, with what it shares. Raises FileNotFoundError if there is none of the name."""
        self.store = store
        self.notes: list[str] = []
        """What was passed over, a sentence each."""
        self._commits: dict[tuple[str, frozenset[str]], pa.Table] = {}
        self._retired: dict[str, set[tuple[int, layout.Kind]]] = {}
        self._resized: dict[str, dict[str, int]] = {}
        self._indexes: dict[str, pa.Table] = {}
        self._markers: dict[str, dict[int, list[str]]] = {}
        self._ledgers: dict[str, Ledger] = {}
        self.runs: tuple[Manifest, ...] = ()
        for name in list_runs(store) if run is None else [run]:
            try:
                self._ledgers[name] = ledger = Ledger(store, read_manifest(store, name))
                self._chain(ledger)
                self.runs += (ledger.manifest,)
            except (BeingDeleted, Damaged) as error:
                if run is not None:
                    raise
                self.notes.append(f"run {name!r} is left out: {error}")
            except FileNotFoundError:  # deleted since it was listed
                if run is not None:
                    raise

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """Of all runs: a commit that a run and its forks have stands in a share of each."""
        found: list[Share] = []
        for manifest in self.runs:
            last = layout.LAST_NUMBER
            for ledger in self._chain(self._ledgers[manifest.run]):
                first = ledger.first_iteration
                found.append(Share(manifest.run, ledger.run, first, last))
                if first:
                    checkpoints = frozenset({str(Step.CHECKPOINT)})
                    found.append(Share(manifest.run, ledger.run, 0, min(first - 1, last), checkpoints))
                last = min(last, first - 1)
        return tuple(share for share in found if share.first <= share.last)

    def commits(self, steps: Collection[str]) -> pa.Table:
        """The commits of some steps, of every share: columns `run` and `owner` before those of `COMMITS`."""
        pieces = []
        for share in self.shares:
            found = self._of_share(share, frozenset(steps))
            labels = [pa.array([name] * found.num_rows, pa.string()) for name in (share.run, share.owner)]
            pieces.append(pa.table([*labels, *found.columns], names=["run", "owner", *found.column_names]))
        if pieces:
            return pa.concat_tables(pieces)
        return pa.schema([("run", pa.string()), ("owner", pa.string()), *COMMITS]).empty_table()

    def tables(self, step: str, kind: str = "table") -> list[Tables]:
        """The files of a step by share, without those that retention removed. `kind`: `table`, or `calls` or `results`
        of those that lie beside it."""
        columns_of_files = ("tables", "table_bytes") if kind == "table" else (kind, f"{kind}_bytes")
        found = []
        for share in self.shares:
            commits = self._of_share(share, frozenset({step}))
            if step == Step.FILTER:
                commits = _newest_rounds(commits)
            retired = self._retirements(share.owner)
            resized = self._redacted_sizes(share.owner)
            columns = [commits.column(name).to_pylist() for name in ("iteration", "shard", "rows", *columns_of_files)]
            files = [
                (path, resized.get(path, size), rows, (iteration, shard))
                for iteration, shard, rows, paths, sizes in zip(*columns, strict=True)
                if (iteration, layout.Kind.of(step)) not in retired
                for path, size in zip(paths, sizes, strict=True)
            ]
            if files:
                found.append(Tables(share, *zip(*files, strict=True)))
        return found

    def delays(self) -> set[int]:
        """Iterations between the rollout and the training of a sample that there are: 0, and others where a batch took
        samples of earlier iterations. Told by what the advantage steps were made from."""
        found = {0}
        for share in self.shares:
            commits = self._of_share(share, frozenset({str(Step.ADVANTAGE)}))
            inputs = commits.column("inputs").combine_chunks()
            for index, iteration in enumerate(commits.column("iteration").to_pylist()):
                for name, _ in inputs[index].as_py():
                    made_in, _, step = name.partition("/")
                    if step.startswith(f"{Step.ROLLOUT}.") or step == Step.ROLLOUT:
                        found.add(iteration - int(made_in))
        return found

    def last_iteration(self, run: str) -> int | None:
        """The newest iteration of a run with a commit."""
        newest = [
            iteration
            for share in self.shares
            if share.run == run
            for iteration in self._listed(share.owner)
            if share.first <= iteration <= share.last
        ]
        return max(newest, default=None)

    def _chain(self, ledger: Ledger) -> list[Ledger]:
        """A run and its parents."""
        chain = [ledger]
        while (parent := chain[-1].parent) is not None:
            chain.append(self._ledgers.setdefault(parent.run, parent))
        return chain

    def _of_share(self, share: Share, steps: frozenset[str]) -> pa.Table:
        wanted = steps & share.steps
        if not wanted:
            return table_of([])
        commits = self._of_run(share.owner, steps)
        iterations = commits.column("iteration")
        within = pc.and_(pc.greater_equal(iterations, share.first), pc.less_equal(iterations, share.last))
        if wanted != steps:
            within = pc.and_(within, pc.is_in(commits.column("step"), pa.array(sorted(wanted))))
        if share.steps != frozenset(Step):  # a parent's checkpoint goes before a fork's own of the same iteration
            older = [s for s in self.shares if s.run == share.run and s.owner != share.owner and s.last <= share.last]
            taken = {
                iteration
                for other in older
                if other.steps == frozenset(Step)
                for iteration in self._of_share(other, wanted).column("iteration").to_pylist()
            }
            within = pc.and_(within, pc.invert(pc.is_in(iterations, pa.array(sorted(taken), pa.int64()))))
        return commits.filter(within)

    def _of_run(self, owner: str, steps: frozenset[str]) -> pa.Table:
        """The commits of some steps that lie in a run's folder, by iteration, step and shard."""
        if (owner, steps) not in self._commits:
            self._commits[owner, steps] = self._read_commits(owner, steps)
        return self._commits[owner, steps]

    def _read_commits(self, owner: str, steps: frozenset[str]) -> pa.Table:
        listed = {
            f"{layout.digits(iteration)}/{name.removesuffix('.json')}"
            for iteration, names in self._listed(owner).items()
            for name in names
            if name.partition(".")[0] in steps
        }
        known = self._index(owner)
        missing = sorted(listed.difference(known.column("name").to_pylist()))
        read = self._read(owner, missing)
        if read.num_rows:
            known = self._indexes[owner] = pa.concat_tables([known, read])
            write_index(self.store.url, self._ledgers[owner].manifest, known)
        mine = known.filter(pc.is_in(known.column("name"), pa.array(sorted(listed), pa.string())))
        return mine.sort_by([("name", "ascending")])

    def _index(self, owner: str) -> pa.Table:
        """The commits of a run that were read before, and are there."""
        if owner not in self._indexes:
            known = read_index(self.store.url, self._ledgers[owner].manifest)
            known = known.filter(pc.is_in(known.column("name"), pa.array(sorted(self._all(owner)), pa.string())))
            if known.num_rows and not self._same_history(owner, known):
                known = known.slice(0, 0)
            self._indexes[owner] = known
        return self._indexes[owner]

    def _same_history(self, owner: str, known: pa.Table) -> bool:
        """Whether the newest commits of an index are still those of the store: they hold the digests of all before
        them, and differ if the store was put back to an older state and went on from there."""
        newest = known.filter(pc.equal(known.column("iteration"), pc.max(known.column("iteration"))))
        read = self._read(owner, newest.column("name").to_pylist())
        return sorted(read.column("digest").to_pylist()) == sorted(newest.column("digest").to_pylist())

    def _read(self, owner: str, names: Sequence[str]) -> pa.Table:
        """Markers by name. What cannot be read is noted and left out."""
        paths = [f"{layout.iterations(owner)}/{name}.json" for name in names]
        rows = []
        for path, data in zip(paths, self.store.read_many(paths), strict=True):
            try:
                if data is not None:  # else the run is being deleted
                    rows.append(row_of(data, path))
            except Damaged as error:
                self.notes.append(f"{error}; it is left out, see `cairn verify {owner}`")
        return table_of(rows)

    def _listed(self, owner: str) -> dict[int, list[str]]:
        """Names of an owner's markers by iteration."""
        if owner not in self._markers:
            iterations = iterations_with_files(self.store, owner)
            if isinstance(self.store, LocalStore):
                names = [self.store.list(layout.iteration(owner, iteration)) for iteration in iterations]
                found = dict(zip(iterations, names, strict=True))
            else:
                found = self._listed_at_once(owner)
            markers = {i: [name for name in names if _is_marker(name)] for i, names in found.items()}
            self._markers[owner] = {i: names for i, names in sorted(markers.items()) if names}
        return self._markers[owner]

    def _listed_at_once(self, owner: str) -> dict[int, list[str]]:
        """One request a thousand files, in place of one an iteration."""
        folder, found = layout.iterations(owner), dict[int, list[str]]()
        for path in self.store.find(folder):
            iteration, _, name = path.removeprefix(f"{folder}/").partition("/")
            number = layout.parse_iteration(f"{iteration}/")
            if number is not None and "/" not in name:
                found.setdefault(number, []).append(name)
        return found

    def _all(self, owner: str) -> list[str]:
        return [
            f"{layout.digits(iteration)}/{name.removesuffix('.json')}"
            for iteration, names in self._listed(owner).items()
            for name in names
        ]

    def _redacted_sizes(self, owner: str) -> dict[str, int]:
        """Bytes of the tables of a run that were redacted since they were committed, by store path: those that they
        have, which are the old ones where a redaction is not finished."""
        if owner not in self._resized:
            redactions = redacted_files(Decisions(self.store, read_manifest(self.store, owner)).all())
            folders = {layout.in_run(owner, path).rpartition("/")[0] for path in redactions}
            self._resized[owner] = {
                p: size for folder in sorted(folders) for p, size in self.store.find(folder).items()
            }
        return self._resized[owner]

    def _retirements(self, owner: str) -> set[tuple[int, layout.Kind]]:
        if owner not in self._retired:
            names = self.store.list(layout.retirements(owner))
            self._retired[owner] = {place for name in names if (place := layout.parse_retired(name)) is not None}
        return self._retired[owner]


def _is_marker(name: str) -> bool:
    place = layout.parse_commit(name)
    return place is not None and place[0] in _STEPS


_STEPS = frozenset(map(str, Step))


def _newest_rounds(commits: pa.Table) -> pa.Table:
    """Of each iteration the filter step of the last round: it says of all groups so far what becomes of them."""
    newest = {iteration: row for row, iteration in enumerate(commits.column("iteration").to_pylist())}
    return commits.take(pa.array(newest.values(), pa.int64()))
