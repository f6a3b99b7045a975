"""The results of evaluations as a relation: `cairn_results`, a row each. Their samples are `cairn_evaluations`."""

import json

import pyarrow as pa

from cairn.storage import evals, layout
from cairn.storage.errors import Damaged
from cairn.storage.evals import Evaluation
from cairn.storage.query.catalogue import Catalogue

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
    """A row for each file of a result: of all, or of those whose weights were a run's when they were evaluated. What
    cannot be read is noted."""
    rows = []
    for folder in evals.folders(catalogue.store):
        path = layout.evaluation_result(folder)
        try:
            result = Evaluation.from_bytes(catalogue.store.read(path), path)
        except FileNotFoundError:
            continue  # nobody has finished it
        except Damaged as error:
            catalogue.notes.append(f"{error}; it is left out, see `cairn verify --evals`")
            continue
        if run in (None, result.origin.get("run")):
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
