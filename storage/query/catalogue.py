"""The catalogue: commits and tables of each run of a store. A fork also has those that it shares with its parent."""

import hashlib
import json
import os
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step, require_readable
from cairn.storage.ledger.decisions import Decisions, redacted_files
from cairn.storage.ledger.ledger import Ledger, is_marker, iterations_with_files
from cairn.storage.ledger.manifest import Manifest, list_runs, read_manifest
from cairn.storage.ledger.shards import SHARED, commits_of_record
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import BeingDeleted, Damaged
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store, is_path

# Commits as rows of one flat, typed table with the fields that queries read.


_TEXTS = pa.map_(pa.string(), pa.string())
_NUMBERS = pa.map_(pa.string(), pa.float64())

COMMITS = pa.schema(
    [
        ("file", pa.string()),
        ("name", pa.string()),
        ("digest", pa.string()),
        ("iteration", pa.int64()),
        ("step", pa.string()),
        ("shard", pa.string()),
        ("attempt", pa.string()),
        ("epoch", pa.int64()),
        ("terms", pa.int64()),
        ("started_at", pa.float64()),
        ("committed_at", pa.float64()),
        ("weight_version_in", pa.int64()),
        ("weight_version_out", pa.int64()),
        ("state_digest", pa.string()),
        ("config_digest", pa.string()),
        ("inputs", _TEXTS),
        ("values", pa.string()),
        ("metrics", _NUMBERS),
        ("timings", _NUMBERS),
        ("device", pa.string()),
        ("threads", pa.int64()),
        ("host", pa.string()),
        ("versions", _TEXTS),
        ("files", pa.int64()),
        ("bytes", pa.int64()),
        ("rows", pa.int64()),
        ("tables", pa.list_(pa.string())),
        ("table_bytes", pa.list_(pa.int64())),
        ("calls", pa.list_(pa.string())),
        ("calls_bytes", pa.list_(pa.int64())),
        ("results", pa.list_(pa.string())),
        ("results_bytes", pa.list_(pa.int64())),
    ]
)
"""Schema of the table of commits. `file` is the name of the file that holds the commit, such as `000042/train` or
`000042/shards.000000`. `tables` are the store paths of the step's Parquet files without those stored next to
its table, `table_bytes` their sizes in bytes. `calls` and `results` are the paths of a rollout's calls and of their
long results, at most one each."""


def rows_of(data: bytes, path: str) -> list[dict[str, Any]]:
    """Return the rows of the commits in a file. Raises Damaged, naming the path.

    Checks the format and the place of the commits, but not the file's digest; `cairn verify` does that.
    """
    folder, _, name = path.rpartition("/")
    shared = layout.parse_record(name) is not None
    try:
        fields = from_json(data)
        require_readable(fields)
        rows = []
        for one in commits_of_record(fields) if shared else [fields]:
            run, iteration, step, shard = one["run"], one["iteration"], one["step"], one.get("shard")
            own = layout.commit(run, iteration, step, shard)
            if (own.rpartition("/")[0] != folder) if shared else (own != path):
                raise ValueError(f"it belongs to {run} {iteration} {step}")
            file = f"{layout.digits(iteration)}/{name.removesuffix('.json')}"
            rows.append({"file": file, "name": layout.commit_name(iteration, step, shard), **_row_of(one)})
        return rows
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"commit {path} cannot be read: {error}") from None


def _row_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a commit's own fields."""
    run, outputs, environment = fields["run"], fields.get("outputs", []), fields["environment"]
    tables = [
        output
        for output in outputs
        if output["path"].endswith(".parquet") and output["path"].rpartition("/")[2] not in layout.SIDE_FILES
    ]
    return {
        **{name: fields.get(name) for name in _PLAIN},
        "terms": fields.get("terms", 0),
        "inputs": _items(fields.get("inputs", {})),
        "values": json.dumps(fields.get("values", {}), ensure_ascii=False),
        "metrics": _numbers(fields.get("metrics", {})),
        "timings": _numbers(fields.get("timings", {})),
        "device": environment["device"],
        "threads": environment["threads"],
        "host": environment.get("host"),
        "versions": _items(environment.get("versions", {})),
        "files": len(outputs),
        "bytes": sum(output["bytes"] for output in outputs),
        "rows": sum(output.get("rows") or 0 for output in tables),
        "tables": [_table_path(run, output["path"]) for output in tables],
        "table_bytes": [output["bytes"] for output in tables],
        **_side_columns(run, "calls", layout.CALLS_FILE, outputs),
        **_side_columns(run, "results", layout.RESULTS_FILE, outputs),
    }


_PLAIN = (
    "digest", "iteration", "step", "shard", "attempt", "epoch", "started_at", "committed_at", "weight_version_in",
    "weight_version_out", "state_digest", "config_digest",
)  # fmt: skip


def table_of(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return rows as a table of `COMMITS`. Raises ValueError if a value has another type."""
    listed = list(rows)
    try:
        return pa.table([pa.array([row[f.name] for row in listed], f.type) for f in COMMITS], schema=COMMITS)
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"it holds a value of another type: {error}") from None


def _table_path(run: str, path: str) -> str:
    full = f"{layout.run(run)}/{path}"
    if not is_path(full) or layout.parse_file(run, full) is None:
        raise ValueError(f"its file {path!r} is not in an attempt's folder")
    return full


def _side_columns(run: str, column: str, name: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return path and size of the file of that name, as two columns of a row; empty if there is no such file."""
    files = [output for output in outputs if output["path"].endswith(f"/{name}")]
    return {
        column: [_table_path(run, output["path"]) for output in files],
        f"{column}_bytes": [output["bytes"] for output in files],
    }


def _items(mapping: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in mapping.items()]


def _numbers(mapping: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return the items as floats. A commit holds NaN and infinities as text."""
    return [(str(name), float(value)) for name, value in mapping.items()]


# Cache of a run's commits between queries, because reading thousands of small files takes most of a query's time.
#
# ```
# <cache>/cairn/commits/<store>/<run>.arrow      an Arrow IPC file of `COMMITS`, followed by its SHA-256
# ```
#
# `<cache>` is `XDG_CACHE_HOME` or `~/.cache`, `<store>` a digest of the store's URL, `<run>` the run's name and a
# digest of its manifest. The cache is not authoritative and may be deleted at any time. A file that is missing, torn or
# altered is ignored, and a failure to write is ignored. Entries are used only for commits whose markers the store
# lists.


_SHA256 = 32
_INDEX_LIFETIME = 30 * 86400
"""Seconds after its last use at which an index is deleted."""


def read_index(url: str, manifest: Manifest) -> pa.Table:
    """Return the commits that earlier queries read; an empty table if there is no usable index."""
    path = _path(url, manifest)
    try:
        data = path.read_bytes()
        if hashlib.sha256(memoryview(data)[:-_SHA256]).digest() == data[-_SHA256:]:
            table = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(data).slice(0, len(data) - _SHA256))).read_all()
            if table.schema.equals(COMMITS):
                with suppress(OSError):
                    os.utime(path)
                return table
    except (OSError, pa.ArrowException):
        pass
    return COMMITS.empty_table()


def write_index(url: str, manifest: Manifest, table: pa.Table) -> None:
    """Cache commits for later queries. Ignores OSError."""
    path = _path(url, manifest)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, COMMITS) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with _replacing(path) as temporary:
            temporary.write_bytes(data + hashlib.sha256(data).digest())
        _forget_unused(path.parent.parent)


def _path(url: str, manifest: Manifest) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    store = hashlib.sha256(url.encode()).hexdigest()[:16]
    return cache / "cairn" / "commits" / store / f"{manifest.run}-{manifest.identity[:16]}.arrow"


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` at the end, so that a reader sees the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _forget_unused(folder: Path) -> None:
    for file in folder.glob("*/*"):
        if time.time() - file.stat().st_mtime > _INDEX_LIFETIME:
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class Share:
    """Iterations of a run that one owner made: the run itself, or a parent."""

    run: str
    owner: str
    first: int
    last: int
    """Last iteration; `first` and `last` are both included."""
    steps: frozenset[str] = frozenset(Step)
    """Steps of the share. A fork may hold its own checkpoints of iterations that it shares."""


@dataclass(frozen=True)
class Tables:
    """Parquet files of one step in one share."""

    share: Share
    paths: tuple[str, ...]
    """Store paths, in the order of iterations and shards."""
    sizes: tuple[int, ...]
    """Sizes in bytes."""
    rows: tuple[int, ...]
    """Number of rows of each step's snapshot."""
    places: tuple[tuple[int, str | None], ...]
    """Iteration and shard of each file."""


class Catalogue:
    """Contents of a store at one time. Each item is read once, on first use. Create a new catalogue to see later
    commits."""

    def __init__(self, store: Store, run: str | None = None):
        """Read the manifests.

        `run` restricts the catalogue to one run with what it shares. Raises FileNotFoundError if there is no such run.
        """
        self.store = store
        self.notes: list[str] = []
        """Sentences about what was skipped."""
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
        """Shares of all runs. A commit that a run shares with its forks is in one share of each."""
        shares: list[Share] = []
        for manifest in self.runs:
            last = layout.LAST_NUMBER
            for ledger in self._chain(self._ledgers[manifest.run]):
                first = ledger.first_iteration
                shares.append(Share(manifest.run, ledger.run, first, last))
                if first:
                    checkpoints = frozenset({str(Step.CHECKPOINT)})
                    shares.append(Share(manifest.run, ledger.run, 0, min(first - 1, last), checkpoints))
                last = min(last, first - 1)
        return tuple(share for share in shares if share.first <= share.last)

    def commits(self, steps: Collection[str]) -> pa.Table:
        """Return the commits of some steps in all shares: columns `run` and `owner`, then those of `COMMITS`."""
        pieces = []
        for share in self.shares:
            commits = self._of_share(share, frozenset(steps))
            labels = [pa.array([name] * commits.num_rows, pa.string()) for name in (share.run, share.owner)]
            pieces.append(pa.table([*labels, *commits.columns], names=["run", "owner", *commits.column_names]))
        if pieces:
            return pa.concat_tables(pieces)
        return pa.schema([("run", pa.string()), ("owner", pa.string()), *COMMITS]).empty_table()

    def tables(self, step: str, kind: str = "table") -> list[Tables]:
        """Return the files of a step by share, without those that retention removed.

        `kind` is `table`, or `calls` or `results` for files stored next to the table.
        """
        columns_of_files = ("tables", "table_bytes") if kind == "table" else (kind, f"{kind}_bytes")
        tables = []
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
                tables.append(Tables(share, *zip(*files, strict=True)))
        return tables

    def delays(self) -> set[int]:
        """Return the delays, in iterations, that occur between the rollout of a sample and its training.

        These are 0, and others if a batch used samples of earlier iterations. They are derived from the inputs of the
        advantage steps.
        """
        delays = {0}
        for share in self.shares:
            commits = self._of_share(share, frozenset({str(Step.ADVANTAGE)}))
            inputs = commits.column("inputs").combine_chunks()
            for index, iteration in enumerate(commits.column("iteration").to_pylist()):
                for name, _ in inputs[index].as_py():
                    made_in, _, step = name.partition("/")
                    if step.startswith(f"{Step.ROLLOUT}.") or step == Step.ROLLOUT:
                        delays.add(iteration - int(made_in))
        return delays

    def last_iteration(self, run: str) -> int | None:
        """Return the newest iteration of a run with a commit, or None."""
        newest = [
            iteration
            for share in self.shares
            if share.run == run
            for iteration in self._listed(share.owner)
            if share.first <= iteration <= share.last
        ]
        return max(newest, default=None)

    def _chain(self, ledger: Ledger) -> list[Ledger]:
        """Return a run and its parents."""
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
        """Return the commits of some steps in a run's folder, by iteration, step and shard."""
        if (owner, steps) not in self._commits:
            self._commits[owner, steps] = self._read_commits(owner, steps)
        return self._commits[owner, steps]

    def _read_commits(self, owner: str, steps: frozenset[str]) -> pa.Table:
        listed = self._names(owner, steps)
        known = self._index(owner)
        missing = sorted(listed.difference(known.column("file").to_pylist()))
        read = self._read(owner, missing)
        if read.num_rows:
            known = self._indexes[owner] = pa.concat_tables([known, read])
            write_index(self.store.url, self._ledgers[owner].manifest, known)
        here = pc.is_in(known.column("file"), pa.array(sorted(listed), pa.string()))
        wanted = pc.is_in(known.column("step"), pa.array(sorted(steps), pa.string()))
        return known.filter(pc.and_(here, wanted)).sort_by([("name", "ascending")])

    def _index(self, owner: str) -> pa.Table:
        """Return the cached commits of a run that the store still has."""
        if owner not in self._indexes:
            known = read_index(self.store.url, self._ledgers[owner].manifest)
            known = known.filter(pc.is_in(known.column("file"), pa.array(sorted(self._names(owner)), pa.string())))
            if known.num_rows and not self._same_history(owner, known):
                known = known.slice(0, 0)
            self._indexes[owner] = known
        return self._indexes[owner]

    def _same_history(self, owner: str, known: pa.Table) -> bool:
        """Return whether the newest commits of an index equal those of the store.

        These commits hold the digests of all before them. They differ if the store was restored to an older state and
        the run continued from there.
        """
        newest = known.filter(pc.equal(known.column("iteration"), pc.max(known.column("iteration"))))
        read = self._read(owner, sorted(set(newest.column("file").to_pylist())))
        return sorted(read.column("digest").to_pylist()) == sorted(newest.column("digest").to_pylist())

    def _read(self, owner: str, names: Sequence[str]) -> pa.Table:
        """Return the rows of files by name. Notes and skips files that cannot be read."""
        paths = [f"{layout.iterations(owner)}/{name}.json" for name in names]
        rows = []
        for path, data in zip(paths, self.store.read_many(paths), strict=True):
            try:
                if data is not None:  # else the run is being deleted
                    rows += rows_of(data, path)
            except Damaged as error:
                self.notes.append(f"{error}; it is left out, see `cairn verify {owner}`")
        return table_of(rows)

    def _listed(self, owner: str) -> dict[int, list[str]]:
        """Return the names of an owner's markers by iteration."""
        if owner not in self._markers:
            if isinstance(self.store, LocalStore):
                iterations = iterations_with_files(self.store, owner)
                entries = {i: self.store.list(layout.iteration(owner, i)) for i in iterations}
            else:
                entries = self._listed_at_once(owner)
            markers = {i: [name for name in names if is_marker(name)] for i, names in entries.items()}
            self._markers[owner] = {i: names for i, names in sorted(markers.items()) if names}
        return self._markers[owner]

    def _listed_at_once(self, owner: str) -> dict[int, list[str]]:
        """Return the same with one request for every thousand files, instead of one for each iteration."""
        folder, names = layout.iterations(owner), dict[int, list[str]]()
        for path in self.store.find(folder):
            iteration, _, name = path.removeprefix(f"{folder}/").partition("/")
            number = layout.parse_iteration(f"{iteration}/")
            if number is not None and "/" not in name:
                names.setdefault(number, []).append(name)
        return names

    def _names(self, owner: str, steps: frozenset[str] = frozenset(Step)) -> set[str]:
        """Return the names of the files with commits of some steps that the store lists."""
        return {
            f"{layout.digits(iteration)}/{name.removesuffix('.json')}"
            for iteration, names in self._listed(owner).items()
            for name in names
            if name.partition(".")[0] in steps or (layout.parse_record(name) is not None and steps & SHARED)
        }

    def _redacted_sizes(self, owner: str) -> dict[str, int]:
        """Return the sizes in bytes, by store path, of the files in the folders of a run's redacted tables.

        They are the current sizes, which are still the old ones if a redaction is not finished.
        """
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


def _newest_rounds(commits: pa.Table) -> pa.Table:
    """Return the filter step of the last round of each iteration, which decides on all groups so far."""
    newest = {iteration: row for row, iteration in enumerate(commits.column("iteration").to_pylist())}
    return commits.take(pa.array(newest.values(), pa.int64()))
