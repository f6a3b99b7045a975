"""A result as a log of Inspect (`.eval`), for its viewer: `inspect view --log-dir FOLDER`.

A log is a zip of JSON. A sample of Inspect is one response to a question here:

| Inspect | here |
|---|---|
| `id`, `epoch` | the question's id, the number of the response from 1 |
| `input`, `target` | the prompt that the model received, the label |
| `scores` | the grader's result, with the answer and its other components |
| `events` | the call of the model and the score: the transcript |
| `metadata` | digests of weights, tokenizer and settings; seed and status of a response |
| `error` | why a response failed, which has no score |

The same result produces the same bytes. Tokens and log-probs stay in the result (`cairn sql`). The format is that of
inspect-ai 0.3.285, version 2 of its logs.
"""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.types import FinishReason
from cairn.storage.evals import Evaluation
from cairn.storage.store.canonical import from_json

_LOG_FORMAT = 2
_STOP_REASONS = {FinishReason.LENGTH: "max_tokens"}
_BATCH = 256
"""Number of rows that are converted at a time."""

Json = dict[str, Any]


def log_name(result: Evaluation) -> str:
    """Return the file name of a result's log, in Inspect's scheme: `<created>_<task>_<id>.eval`."""
    created = _iso(result.started_at).replace(":", "-")
    return f"{created}_{result.key.benchmark}_{_id(result.digest)}.eval"


def export_inspect(result: Evaluation, rows: pa.Table, file: Path, model: str) -> None:
    """Write a result, with its `rows` (`cairn.storage.evals.read_samples`), as a log. `model`: its name in the viewer.

    Atomically replaces an existing file. Raises OSError where it cannot be written.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as log:
            spec = _spec(result, rows, model)
            plan = {"name": "plan", "steps": [], "config": spec["model_generate_config"]}
            _write(log, "_journal/start.json", {"version": _LOG_FORMAT, "eval": spec, "plan": plan})
            summaries = []
            for sample in _samples(result, rows, model):
                _write(log, f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
                summaries.append(_summary(sample))
            _write(log, "summaries.json", summaries)
            _write(log, "header.json", _header(result, rows, spec, plan))
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _spec(result: Evaluation, rows: pa.Table, model: str) -> Json:
    benchmark = _benchmark(result)
    sampling = benchmark.get("sampling") or {}
    numbers = {name: sampling[name] for name in ("temperature", "top_p", "max_tokens") if name in sampling}
    return {
        "eval_id": _id(result.digest),
        "run_id": _id(result.key.digest),
        "created": _iso(result.started_at),
        "task": result.key.benchmark,
        "task_id": result.key.benchmark,
        "task_version": benchmark.get("version", 0),
        "dataset": {
            "name": benchmark.get("title", result.key.benchmark),
            "location": result.values.get("data"),
            "samples": len(rows["prompt_index"].unique()),
        },
        "model": model,
        "model_generate_config": numbers,
        "config": {"epochs": 1 + max(rows["sample_index"].to_pylist(), default=0)},
        "packages": result.environment.versions,
        "metadata": {
            "weights": result.key.weights,
            "tokenizer": result.key.tokenizer,
            "settings": result.key.settings,
            "result": result.digest,
            "origin": result.origin,
        },
    }


def _header(result: Evaluation, rows: pa.Table, spec: Json, plan: Json) -> Json:
    graded = len(rows) - rows["reward"].null_count
    grader = _grader(rows)
    scores = [
        {
            "name": grader,
            "scorer": grader,
            "scored_samples": graded,
            "unscored_samples": len(rows) - graded,
            "metrics": {name: {"name": name, "value": value} for name, value in result.metrics.items()},
        }
    ]
    return {
        "version": _LOG_FORMAT,
        "status": "success",
        "eval": spec,
        "plan": plan,
        "results": {"total_samples": len(rows), "completed_samples": graded, "scores": scores},
        "stats": {
            "started_at": _iso(result.started_at),
            "completed_at": _iso(result.committed_at),
            "model_usage": {spec["model"]: _usage(_tokens(rows["prompt_ids"]), _tokens(rows["response_ids"]))},
        },
    }


def _samples(result: Evaluation, rows: pa.Table, model: str) -> Iterator[Json]:
    ids = _ids(rows)
    for batch in rows.to_batches(max_chunksize=_BATCH):
        for row in batch.to_pylist():
            yield _sample(result, row, ids[row["prompt_index"]], model)


def _sample(result: Evaluation, row: Mapping[str, Any], id: str | int, model: str) -> Json:
    name = f"{result.digest}/{row['prompt_index']}/{row['sample_index']}"
    question = {"id": _id(f"{name}/question"), "role": "user", "content": row["prompt_text"]}
    answer = {"id": _id(f"{name}/answer"), "role": "assistant", "content": row["response_text"], "model": model}
    usage = _usage(len(row["prompt_ids"] or ()), len(row["response_ids"]))
    stop = _STOP_REASONS.get(row["finish_reason"], "stop")
    output = {"model": model, "choices": [{"message": answer, "stop_reason": stop}], "usage": usage}
    score, began = _score(row), _iso(result.started_at)
    event = {"timestamp": began, "working_start": 0.0}
    call = {"uuid": _id(f"{name}/call"), "event": "model", "model": model, "input": [question], "tools": []}
    events: list[Json] = [event | call | {"tool_choice": "none", "config": {}, "output": output}]
    if row["seconds"] is not None:
        events[0]["working_time"] = row["seconds"]
    sample: Json = {
        "id": id,
        "epoch": row["sample_index"] + 1,
        "input": row["prompt_text"],
        "target": row["label"] or "",
        "messages": [question, answer],
        "output": output,
        "metadata": {
            "seed": str(row["seed"]),  # it has 64 bits, and JavaScript would round it
            "status": row["status"],
            "grader_version": row["grader_version"],
            **(from_json(row["metadata"]) if row["metadata"] else {}),
        },
        "events": events,
        "model_usage": {model: usage},
        "started_at": began,
        "total_time": row["seconds"],
    }
    if score is not None:
        sample["scores"] = {row["grader"]: score}
        events.append(
            event | {"uuid": _id(f"{name}/score"), "event": "score", "score": score, "target": sample["target"]}
        )
    if row["error"] is not None:
        sample["error"] = {"message": row["error"], "traceback": row["error"], "traceback_ansi": row["error"]}
    return sample


def _score(row: Mapping[str, Any]) -> Json | None:
    if row["reward"] is None:
        return None
    components = from_json(row["components"]) if row["components"] else {}
    return {"value": row["reward"], "answer": row["answer"], "metadata": components}


def _summary(sample: Json) -> Json:
    """Return the fields of a sample for the viewer's list."""
    names = ("id", "epoch", "input", "target", "metadata", "scores", "model_usage", "total_time")
    error = {"error": sample["error"]["message"]} if "error" in sample else {}
    shown = {name: sample[name] for name in names if name in sample}
    return shown | error | {"completed": True, "message_count": len(sample["messages"])}


def _ids(rows: pa.Table) -> dict[int, str | int]:
    """Return a unique id for each question: its own id, as a number where all are numbers, or its row where ids
    repeat."""
    named = dict(zip(rows["prompt_index"].to_pylist(), rows["prompt_id"].to_pylist(), strict=True))
    if len(set(named.values())) < len(named):
        return {index: index for index in named}
    if all(id.isascii() and id.isdecimal() and str(int(id)) == id for id in named.values()):
        return {index: int(id) for index, id in named.items()}
    return dict(named)


def _grader(rows: pa.Table) -> str:
    return str(rows["grader"][0]) if len(rows) else "grader"


def _benchmark(result: Evaluation) -> Mapping[str, Any]:
    benchmark = result.values.get("benchmark")
    return benchmark if isinstance(benchmark, Mapping) else {}


def _tokens(column: pa.ChunkedArray) -> int:
    return pc.sum(pc.list_value_length(column)).as_py() or 0


def _usage(prompt: int, response: int) -> Json:
    return {"input_tokens": prompt, "output_tokens": response, "total_tokens": prompt + response}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _id(text: str) -> str:
    """Return an id of 22 characters, as Inspect's; equal for equal text."""
    return hashlib.sha256(text.encode()).hexdigest()[:22]


def _write(log: zipfile.ZipFile, name: str, value: Json | Sequence[Json]) -> None:
    entry = zipfile.ZipInfo(name)  # without the time of writing
    entry.compress_type = zipfile.ZIP_DEFLATED
    log.writestr(entry, json.dumps(value, ensure_ascii=False, allow_nan=False))
