"""Relations below the views: `cairn_runs`, `cairn_commits`, and the tables of each step, such as `cairn_rollout`.

A step's relation has the columns `run`, `owner`, `iteration` and `shard`, then those of its tables. `iteration` and
`shard` come from the file's path, so that DuckDB does not open files of iterations that a query excludes.
"""

import io
import json
import re
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from cairn.storage import evals
from cairn.storage.evals import Evaluation
from cairn.storage.ledger import layout, schemas
from cairn.storage.ledger.commits import Step
from cairn.storage.query.catalogue import Catalogue, Tables
from cairn.storage.query.sample_views import View
from cairn.storage.store.errors import Damaged, StoreError
from cairn.storage.store.local import LocalStore
from cairn.storage.store.store import Store

# Access of DuckDB to the ledger's files: local files directly, those of an object store through `fsspec`.


SCHEME = "ledger"
_WHOLE_FILE_BYTES = 2**20
"""Greatest size in bytes of a file that is read by one request. Larger files are read in parts on demand."""
_BLOCK_BYTES = 2**20
"""Least number of bytes of a request for a part."""


class LedgerFiles(AbstractFileSystem):
    """Read-only file system `ledger://PATH` with exactly the files of a store whose sizes are in `sizes`."""

    protocol = SCHEME
    cachable = False

    def __init__(self, store: Store, sizes: Mapping[str, int]):
        """`sizes` are sizes in bytes by store path; files may be added later."""
        super().__init__()
        self.store = store
        self.sizes = sizes

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        if name not in self.sizes:
            raise FileNotFoundError(path)
        return {"name": name, "size": self.sizes[name], "type": "file"}

    def modified(self, path: str) -> datetime:
        """Return a constant time, because committed files never change."""
        return datetime.fromtimestamp(0, UTC)

    def glob(self, path: str, **_: Any) -> list[str]:
        name = self._strip_protocol(path)
        return [name] if name in self.sizes else []

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode != "rb":
            raise PermissionError(f"{path} is read-only here")
        name = self._strip_protocol(path)
        if self.info(path)["size"] <= _WHOLE_FILE_BYTES:
            return io.BytesIO(self.store.read(name))
        return _Part(self, name, size=self.sizes[name], block_size=_BLOCK_BYTES, cache_type="readahead")


class _Part(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.store.read_range(self.path, start, min(end, self.size))


def unreadable(store: Store, sizes: Mapping[str, int]) -> dict[str, str]:
    """Return the files that are lost or not Parquet files, each with a sentence that says what is wrong."""
    problems = {}
    for path, size in sizes.items():
        try:
            tail = store.read_range(path, max(0, size - 8), size)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or length + 8 > size:
                raise ValueError("it does not end like a Parquet file")
            pq.read_schema(pa.BufferReader(b"PAR1" + store.read_range(path, size - 8 - length, size)))
        except FileNotFoundError:
            problems[path] = f"{path} is committed but missing; it is left out, see `cairn verify`"
        except (ValueError, OSError, pa.ArrowException, StoreError) as error:
            problems[path] = f"{path} cannot be read ({error!s:.100}); it is left out, see `cairn verify`"
    return problems


# Results of evaluations as the relation `cairn_results`, one row each. Their samples are `cairn_evaluations`.


_RESULTS = pa.schema(
    [
        ("file", pa.string()),
        ("bytes", pa.int64()),
        ("result", pa.string()),
        ("run", pa.string()),
        ("iteration", pa.int64()),
        ("weight_version", pa.int64()),
        ("model", pa.string()),
        ("weights", pa.string()),
        ("tokenizer", pa.string()),
        ("engine", pa.string()),
        ("dtype", pa.string()),
        ("settings", pa.string()),
        ("score", pa.float64()),
        ("metrics", pa.string()),
        ("committed_at", pa.float64()),
    ]
)


def results_table(catalogue: Catalogue, run: str | None) -> pa.Table:
    """Return one row for each file of a result. Notes results that cannot be read.

    Includes all results, or those whose weights came from `run` when they were evaluated.
    """
    rows = []
    for folder in evals.folders(catalogue.store):
        try:
            result = evals.read(catalogue.store, folder)
        except Damaged as error:
            catalogue.notes.append(f"{error}; it is left out, see `cairn verify --evals`")
            continue
        if result is not None and run in (None, result.origin.get("run")):
            rows += [
                {"file": f"{folder}/{output.path}", "bytes": output.bytes, **_row(result)} for output in result.outputs
            ]
    return pa.Table.from_pylist(rows, _RESULTS)


def _row(result: Evaluation) -> dict[str, object]:
    settings, origin = result.key.settings, result.origin
    return {
        "result": result.key.folder,
        **{name: origin.get(name) for name in ("run", "iteration", "weight_version", "model")},
        "weights": result.key.weights,
        "tokenizer": result.key.tokenizer,
        "engine": settings.get("engine"),
        "dtype": settings.get("dtype"),
        "settings": json.dumps(settings, sort_keys=True),
        "score": result.metrics.get("score"),
        "metrics": json.dumps(result.metrics, sort_keys=True),
        "committed_at": result.committed_at,
    }


_EVALUATIONS = "evaluations"
_SIDE_RELATIONS = {"calls": "calls", "long_results": "results"}
"""Relations of files stored next to the tables of rollouts, with their kinds in the catalogue."""
_TABLES: dict[str, pa.Schema] = {
    Step.ROLLOUT: pa.schema([*schemas.ROLLOUT, schemas.SUPPORT, *schemas.SEQUENCES, schemas.IMAGES]),
    Step.REWARD: pa.schema([*schemas.REWARD, schemas.TRAJECTORY_REWARDS, schemas.RAW_REWARD]),
    Step.FILTER: pa.schema(
        [
            *schemas.FILTER,
            *(schemas.PRIORITY, schemas.BUFFER_KEY, schemas.REMOVED, schemas.STALE_TOKENS, schemas.STALE_WEIGHTS),
        ]
    ),
    Step.SCORE: schemas.SCORE,
    Step.ADVANTAGE: schemas.ADVANTAGE,
    Step.EVAL: pa.schema([*schemas.EVAL, *schemas.SEQUENCES, schemas.IMAGES]),
    _EVALUATIONS: schemas.EVALUATED,
    "calls": schemas.CALLS.remove(schemas.CALLS.get_field_index(schemas.ROUTED.name)),
    "long_results": schemas.LONG_RESULTS,
}
"""Columns that a table may have. Those that a file lacks are NULL."""
_RUNS = pa.schema(
    [
        ("run", pa.string()),
        ("id", pa.string()),
        ("parent", pa.string()),
        ("parent_iteration", pa.int64()),
        ("created_at", pa.float64()),
        ("code_version", pa.string()),
        ("last_iteration", pa.int64()),
        ("inputs", pa.string()),
        ("config", pa.string()),
        ("imported", pa.string()),
    ]
)
_BY_ORIGIN = "_by_origin"
_DELAYS = 8
"""Greatest number of delays between rollout and training for which the tables are scanned once per delay."""
_RENAMED = {"iteration": "generated_in"}
"""Columns that are renamed because the relation uses their names for the place of the table."""
_TYPES = {
    pa.int64(): "BIGINT", pa.int32(): "INTEGER", pa.uint8(): "UTINYINT", pa.uint64(): "UBIGINT", pa.bool_(): "BOOLEAN",
    pa.float32(): "FLOAT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR",
}  # fmt: skip


class Relations:
    """Relations on which the views of one query are built."""

    def __init__(self, catalogue: Catalogue, without: Collection[str] = (), run: str | None = None):
        """Prepare the relations.

        Args:
            catalogue: contents of the store.
            without: store paths of files that cannot be read.
            run: restricts results to those of this run's weights.
        """
        self.catalogue = catalogue
        self._run = run
        self.sizes: dict[str, int] = {}
        """Sizes in bytes of the files that may be read, by store path."""
        self._without = without
        self._defined: set[str] = set()
        store = catalogue.store
        self._files = None if isinstance(store, LocalStore) else LedgerFiles(store, self.sizes)
        self._root = f"{store.url}/" if self._files is None else f"{SCHEME}://"
        self.folders = [self._root + layout.RUNS, self._root + layout.EVALS]
        """Folders in which DuckDB finds the files."""

    def select(self, view: View, columns: Collection[str]) -> str:
        """Return the SELECT of a view's columns that reads the fewest tables."""
        twin = view.twin is not None and f" {view.twin.alias}.run" in view.select(columns)
        return view.select(columns, same_rows=twin and self._every_sample_is_graded())

    def define(self, connection: duckdb.DuckDBPyConnection, select: str) -> None:
        """Create the relations that a SELECT names, unless they exist."""
        for name in sorted(set(re.findall(r"\bcairn_(\w+)", select)) - self._defined):
            if self._files is not None and not self._defined:
                connection.register_filesystem(self._files)
            self._defined.add(name)
            step = name.removesuffix(_BY_ORIGIN)
            if name == "runs":
                connection.register("cairn_runs", self._runs())
            elif name == "commits":
                connection.register("cairn_commits", self.catalogue.commits(list(Step)))
            elif name == _EVALUATIONS:
                self._define_evaluations(connection)
            elif step != name:
                self.define(connection, f"cairn_{step}")
                self._define_by_origin(connection, step)
            else:
                self._define_tables(connection, step)

    def _runs(self) -> pa.Table:
        rows = [
            {
                "run": manifest.run,
                "id": manifest.id,
                "parent": manifest.parent and manifest.parent.run,
                "parent_iteration": manifest.parent and manifest.parent.iteration,
                "created_at": manifest.created_at,
                "code_version": json.dumps(manifest.code_version.model_dump(mode="json")),
                "last_iteration": self.catalogue.last_iteration(manifest.run),
                "inputs": json.dumps(manifest.inputs),
                "config": None if manifest.imported else json.dumps(manifest.config, ensure_ascii=False),
                "imported": manifest.imported and json.dumps(manifest.imported.model_dump(), ensure_ascii=False),
            }
            for manifest in self.catalogue.runs
        ]
        return pa.Table.from_pylist(rows, _RUNS)

    def _every_sample_is_graded(self) -> bool:
        """Return whether each shard's rollout has as many rows as its rewards, ignoring files that cannot be read."""
        counted = [
            {
                (tables.share.run, place): rows
                for tables in self.catalogue.tables(step)
                for place, path, rows in zip(tables.places, tables.paths, tables.rows, strict=True)
                if path not in self._without
            }
            for step in (Step.ROLLOUT, Step.REWARD)
        ]
        return counted[0] == counted[1]

    def _define_by_origin(self, connection: duckdb.DuckDBPyConnection, step: str) -> None:
        """Define the tables of a step of a batch with `generated_in`, the iteration that a sample may come from.

        There is one row for each iteration from which batches used samples. So a condition on `generated_in` avoids
        opening the files of other iterations.
        """
        delays = self.catalogue.delays()
        branches = [f"SELECT *, iteration - {delay} AS generated_in FROM cairn_{step}" for delay in sorted(delays)]
        if len(branches) > _DELAYS:  # each scans every file
            branches = [
                f"SELECT t.*, f.generated_in FROM cairn_{step} t JOIN cairn_filter f ON f.run = t.run "
                "AND f.iteration = t.iteration AND f.group_id = t.group_id AND f.disposition = 'train'"
            ]
            self.define(connection, branches[0])
        connection.execute(f"CREATE TEMP VIEW cairn_{step}{_BY_ORIGIN} AS {' UNION ALL '.join(branches)}")

    def _define_tables(self, connection: duckdb.DuckDBPyConnection, step: str) -> None:
        branches = []
        kind = _SIDE_RELATIONS.get(step)
        shares = self.catalogue.tables(step) if kind is None else self.catalogue.tables(Step.ROLLOUT, kind)
        for number, tables in enumerate(shares):
            paths = self._allow(tables.paths, tables.sizes)
            if paths:
                variable = f"cairn_{step}_{number}"
                connection.execute(f"SET VARIABLE {variable} = $1", [paths])
                branches.append(self._branch(step, tables, variable))
        if not branches:
            place = {"run": "VARCHAR", "owner": "VARCHAR", "iteration": "BIGINT", "shard": "VARCHAR"}
            own = {_RENAMED.get(name, name): type_ for name, type_ in _columns(step).items() if name != "shard"}
            branches = [_no_rows(place | own)]
        select = " UNION ALL ".join(branches)
        connection.execute(f"CREATE TEMP VIEW cairn_{step} AS {select}")

    def _allow(self, paths: Iterable[str], sizes: Iterable[int]) -> list[str]:
        """Allow reading files. Return them as DuckDB finds them, without those that cannot be read."""
        files = {path: size for path, size in zip(paths, sizes, strict=True) if path not in self._without}
        self.sizes |= files
        return [self._root + path for path in files]

    def _define_evaluations(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Define the samples of results in `evals/`, joined with their results."""
        results = results_table(self.catalogue, self._run)
        files = results["file"].to_pylist()
        usable = self._allow(files, results["bytes"].to_pylist())
        paths = pa.array([self._root + path for path in files], pa.string())
        connection.register("cairn_results", results.set_column(0, "file", paths))
        if usable:
            connection.execute("SET VARIABLE cairn_evaluations = $1", [usable])
            read = _read_parquet("cairn_evaluations", _EVALUATIONS)
        else:
            read = f"({_no_rows({**_columns(_EVALUATIONS), 'filename': 'VARCHAR'})})"
        connection.execute(
            f"CREATE TEMP VIEW cairn_evaluations AS SELECT * FROM cairn_results r JOIN {read} s ON s.filename = r.file"
        )

    def _branch(self, step: str, tables: Tables, variable: str) -> str:
        start = len(self._root) + len(layout.iterations(tables.share.owner)) + 2
        after = start + len(layout.digits(0)) + len(f"/{Step.ROLLOUT if step in _SIDE_RELATIONS else step}/")
        at = f"substr(filename, {start}, 6)::BIGINT AS iteration, {_shard(step, tables, after)} AS shard"
        own = ", ".join(f'"{name}" AS "{_RENAMED.get(name, name)}"' for name in _columns(step) if name != "shard")
        return (
            f"SELECT {quoted(tables.share.run)} AS run, {quoted(tables.share.owner)} AS owner, "
            f"{at}, {own} FROM {_read_parquet(variable, step)}"
        )


def quoted(text: str) -> str:
    """Return the text as an SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


def _read_parquet(variable: str, step: str) -> str:
    """Return the SQL that reads a step's files, which a variable lists. Columns that a file lacks are NULL."""
    known = ", ".join(
        f"{quoted(name)}: {{name: {quoted(name)}, type: {quoted(type_)}, default_value: NULL}}"
        for name, type_ in _columns(step).items()
    )
    return f"read_parquet(getvariable('{variable}'), schema = MAP {{{known}}}, filename = true)"


def _columns(step: str) -> dict[str, str]:
    """Return the SQL types of the columns of a step's tables, by name."""
    return {field.name: _sql_type(field.type) for field in _TABLES[step]}


def _sql_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"{_sql_type(type_.value_type)}[]"
    if pa.types.is_struct(type_):
        return f"STRUCT({', '.join(f'{field.name} {_sql_type(field.type)}' for field in type_)})"
    return _TYPES[type_]


def _shard(step: str, tables: Tables, start: int) -> str:
    """Return the SQL expression of a table's shard, which starts at character `start` of its path.

    The filter's table has a column with the shard of the rollout.
    """
    if step == Step.FILTER:
        return "shard"
    lengths = {None if shard is None else len(shard) for _, shard in tables.places}
    if lengths == {None}:
        return "NULL::VARCHAR"
    if len(lengths) == 1:
        return f"substr(filename, {start}, {lengths.pop()})"
    attempt = f"split_part(substr(filename, {start}), '/', 1)"
    return f"nullif(regexp_replace({attempt}, '\\.?\\d{{6}}-[0-9a-f]+$', ''), '')"


def _no_rows(columns: Mapping[str, str]) -> str:
    """Return a SELECT without rows, from the SQL types of its columns by name."""
    values = ", ".join(f'NULL::{type_} AS "{name}"' for name, type_ in columns.items())
    return f"SELECT {values} WHERE false"
