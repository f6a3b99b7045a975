"""Commits as rows of one table: what queries read of them, flat and typed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from cairn.storage import layout
from cairn.storage.canonical import from_json
from cairn.storage.errors import Damaged
from cairn.storage.paths import is_path
from cairn.storage.records import require_readable

_TEXTS = pa.map_(pa.string(), pa.string())
_NUMBERS = pa.map_(pa.string(), pa.float64())

COMMITS = pa.schema(
    [
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
"""`tables` are the store paths of the step's Parquet files but those beside its table, `table_bytes` their sizes;
`calls` and `results` those of the calls of a rollout's samples and their long results, at most one each."""


def row_of(data: bytes, path: str) -> dict[str, Any]:
    """The row of a commit's marker. Its form and place are checked, its digest is not: that is for `cairn verify`.
    Raises Damaged, naming the path."""
    try:
        fields = from_json(data)
        require_readable(fields)
        run, iteration, step, shard = fields["run"], fields["iteration"], fields["step"], fields.get("shard")
        if layout.commit(run, iteration, step, shard) != path:
            raise ValueError(f"it is that of {run} {iteration} {step}")
        outputs, environment = fields.get("outputs", []), fields["environment"]
        tables = [
            output
            for output in outputs
            if output["path"].endswith(".parquet") and output["path"].rpartition("/")[2] not in layout.BESIDE
        ]
        return {
            **{name: fields.get(name) for name in _PLAIN},
            "name": layout.commit_name(iteration, step, shard),
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
            **_beside(run, "calls", layout.CALLS_FILE, outputs),
            **_beside(run, "results", layout.RESULTS_FILE, outputs),
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(f"commit {path} cannot be read: {error}") from None


_PLAIN = (
    "digest", "iteration", "step", "shard", "attempt", "epoch", "started_at", "committed_at", "weight_version_in",
    "weight_version_out", "state_digest", "config_digest",
)  # fmt: skip


def table_of(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows as a table of `COMMITS`. Raises ValueError if one holds something of another type."""
    listed = list(rows)
    try:
        return pa.table([pa.array([row[f.name] for row in listed], f.type) for f in COMMITS], schema=COMMITS)
    except (pa.ArrowException, TypeError) as error:
        raise ValueError(f"it holds a value of another type: {error}") from None


def _table_path(run: str, path: str) -> str:
    full = f"{layout.run(run)}/{path}"
    if not is_path(full) or layout.parse_file(run, full) is None:
        raise ValueError(f"its file {path!r} is none of an attempt")
    return full


def _beside(run: str, column: str, name: str, outputs: list[dict[str, Any]]) -> dict[str, Any]:
    """The file of a name, where there is one."""
    found = [output for output in outputs if output["path"].endswith(f"/{name}")]
    return {
        column: [_table_path(run, output["path"]) for output in found],
        f"{column}_bytes": [output["bytes"] for output in found],
    }


def _items(mapping: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in mapping.items()]


def _numbers(mapping: Mapping[str, Any]) -> list[tuple[str, float]]:
    """NaN and infinities stand in a commit as text."""
    return [(str(name), float(value)) for name, value in mapping.items()]
