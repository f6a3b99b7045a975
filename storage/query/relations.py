"""The relations below the views: `cairn_runs`, `cairn_commits`, and for each step its tables, as in `cairn_rollout`.

A step's tables have the columns that they were written with, and before them where they lie: `run`, `owner`,
`iteration` and `shard`. The latter two are read off the file's path, so that DuckDB opens no file of an iteration that
a query leaves out.
"""

import json
from collections.abc import Collection

import duckdb
import pyarrow as pa

from cairn.storage import layout, schemas
from cairn.storage.commits import Step
from cairn.storage.local import LocalStore
from cairn.storage.query.catalogue import Catalogue, Tables
from cairn.storage.query.files import SCHEME, LedgerFiles

_TABLES: dict[str, pa.Schema] = {
    Step.ROLLOUT: schemas.ROLLOUT.append(schemas.KEPT).append(schemas.TRAJECTORIES),
    Step.REWARD: schemas.REWARD,
    Step.FILTER: schemas.FILTER,
    Step.SCORE: schemas.SCORE,
    Step.ADVANTAGE: schemas.ADVANTAGE,
    Step.EVAL: schemas.EVAL.append(schemas.TRAJECTORIES),
}
"""The columns that a table may have; those that it was written without are NULL."""
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
    ]
)
_RENAMED = {"iteration": "generated_in"}
"""Columns whose names say here where a table lies."""
_TYPES = {
    pa.int64(): "BIGINT", pa.int32(): "INTEGER", pa.uint8(): "UTINYINT", pa.uint64(): "UBIGINT", pa.bool_(): "BOOLEAN",
    pa.float32(): "FLOAT", pa.float64(): "DOUBLE", pa.string(): "VARCHAR",
}  # fmt: skip


class Relations:
    """What the views of one query stand on."""

    def __init__(self, catalogue: Catalogue, without: Collection[str] = ()):
        """`without`: store paths of files that cannot be read."""
        self.catalogue = catalogue
        self.sizes: dict[str, int] = {}
        """Bytes of the files that may be read, by store path."""
        self._without = without
        self._defined: set[str] = set()
        store = catalogue.store
        self._files = None if isinstance(store, LocalStore) else LedgerFiles(store)
        self._root = f"{store.url}/" if self._files is None else f"{SCHEME}://"
        self.folders = [self._root + layout.runs()]
        """Where DuckDB finds the files."""

    def define(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        """Make `cairn_NAME`, unless it is there."""
        if name in self._defined:
            return
        if self._files is not None and not self._defined:
            connection.register_filesystem(self._files)
        self._defined.add(name)
        if name == "runs":
            connection.register("cairn_runs", self._runs())
        elif name == "commits":
            connection.register("cairn_commits", self.catalogue.commits(list(Step)))
        else:
            self._define_tables(connection, name)

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
                "config": json.dumps(manifest.config, ensure_ascii=False),
            }
            for manifest in self.catalogue.runs
        ]
        return pa.Table.from_pylist(rows, _RUNS)

    def _define_tables(self, connection: duckdb.DuckDBPyConnection, step: str) -> None:
        branches = []
        for number, tables in enumerate(self.catalogue.tables(step)):
            paths = self._usable(tables)
            if paths:
                variable = f"cairn_{step}_{number}"
                connection.execute(f"SET VARIABLE {variable} = $1", [paths])
                branches.append(self._branch(step, tables, variable))
        select = " UNION ALL ".join(branches) or _nothing(step)
        connection.execute(f"CREATE TEMP VIEW cairn_{step} AS {select}")

    def _usable(self, tables: Tables) -> list[str]:
        files = {p: size for p, size in zip(tables.paths, tables.sizes, strict=True) if p not in self._without}
        self.sizes |= files
        if self._files is not None:
            self._files.sizes |= files
        return [self._root + path for path in files]

    def _branch(self, step: str, tables: Tables, variable: str) -> str:
        start = len(self._root) + len(layout.iterations(tables.share.owner)) + 2
        after = start + len(layout.digits(0)) + len(f"/{step}/")
        attempt = f"split_part(substr(filename, {after}), '/', 1)"
        known = ", ".join(
            f"{quoted(name)}: {{name: {quoted(name)}, type: {quoted(type_)}, default_value: NULL}}"
            for name, type_ in _columns(step)
        )
        return (
            f"SELECT {quoted(tables.share.run)} AS run, {quoted(tables.share.owner)} AS owner, "
            f"substr(filename, {start}, 6)::BIGINT AS iteration, {_shard(step, attempt)} AS shard, {_renamed(step)} "
            f"FROM read_parquet(getvariable('{variable}'), schema = MAP {{{known}}}, filename = true)"
        )


def quoted(text: str) -> str:
    """As a string of SQL."""
    return "'" + text.replace("'", "''") + "'"


def _columns(step: str) -> list[tuple[str, str]]:
    """Names and types in SQL."""
    return [(field.name, _sql_type(field.type)) for field in _TABLES[step]]


def _sql_type(type_: pa.DataType) -> str:
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return f"{_sql_type(type_.value_type)}[]"
    if pa.types.is_struct(type_):
        return f"STRUCT({', '.join(f'{field.name} {_sql_type(field.type)}' for field in type_)})"
    return _TYPES[type_]


def _shard(step: str, attempt: str) -> str:
    """The filter's rows name the shard of the rollout themselves."""
    return "shard" if step == Step.FILTER else f"nullif(regexp_replace({attempt}, '\\.?\\d{{6}}-[0-9a-f]+$', ''), '')"


def _own(step: str) -> dict[str, str]:
    """Types in SQL of a step's columns besides those of its place, by the name that they have in its tables."""
    return {name: type_ for name, type_ in _columns(step) if name != "shard"}


def _renamed(step: str) -> str:
    return ", ".join(f'"{name}" AS "{_RENAMED.get(name, name)}"' for name in _own(step))


def _nothing(step: str) -> str:
    place = {"run": "VARCHAR", "owner": "VARCHAR", "iteration": "BIGINT", "shard": "VARCHAR"}
    own = {_RENAMED.get(name, name): type_ for name, type_ in _own(step).items()}
    columns = ", ".join(f'NULL::{type_} AS "{name}"' for name, type_ in (place | own).items())
    return f"SELECT {columns} WHERE false"
