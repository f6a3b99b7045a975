"""Conversion between records of calls and rows of a table."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.engines.types.trajectories import FIRST_CALL, CallKind, CallRecord, SampleKey, Segment
from cairn.engines.types.types import FinishReason, SamplingSupport
from cairn.storage.ledger.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.ledger.schemas import CALLS, LONG_RESULTS
from cairn.tasks.batch.sequences import routed_column, routes_of

LONG = 1024
"""Characters above which a result is stored in a table of its own."""
_SAMPLED = ("response_ids", "log_probs", "weight_versions", "kept_token_ids", "routed_experts", "seed", "finish_reason")


def call_table(records: Sequence[CallRecord]) -> pa.Table:
    """Return the records as rows of CALLS."""
    segments = [record.segment for record in records]
    columns: dict[str, Any] = {
        "group_id": [record.group_id for record in records],
        "sample_index": [record.index for record in records],
        "order": [record.order for record in records],
        "call": [record.call for record in records],
        "kind": [str(record.kind) for record in records],
        "name": [record.name for record in records],
        "turn": [record.turn for record in records],
        "arguments": [record.arguments for record in records],
        "arguments_digest": [record.arguments_digest for record in records],
        "result": [record.result for record in records],
        "result_digest": [None] * len(records),
        "error": [record.error for record in records],
        "reason": [record.reason for record in records],
        "given_tokens": [record.given for record in records],
        "response_ids": [None if one is None else one.ids for one in segments],
        "log_probs": [None if one is None else one.log_probs for one in segments],
        "weight_versions": [None if one is None else one.weight_versions for one in segments],
        "kept_token_ids": [None if one is None or one.kept is None else _support_sets(one.kept) for one in segments],
        "seed": [None if one is None else one.seed for one in segments],
        "finish_reason": [None if one is None else str(one.finish_reason) for one in segments],
        "cached_tokens": [0 if one is None else one.cached_tokens for one in segments],
        "started_at": [record.started_at for record in records],
        "seconds": [record.seconds for record in records],
    }
    arrays = {name: pa.array(column, CALLS.field(name).type) for name, column in columns.items()}
    arrays["routed_experts"] = routed_column([[None if one is None else one.routed_experts] for one in segments])
    return pa.table([arrays[name] for name in CALLS.names], CALLS)


def call_records(table: pa.Table) -> list[CallRecord]:
    """Return the records in rows of CALLS."""
    return [_record(row) for row in table.to_pylist()]


def by_sample(records: Sequence[CallRecord]) -> dict[SampleKey, list[CallRecord]]:
    """Return the records of each sample, in their order."""
    grouped: dict[SampleKey, list[CallRecord]] = {}
    for record in records:
        grouped.setdefault(record.key, []).append(record)
    return grouped


def call_tables(calls: pa.Table, samples: pa.Table) -> dict[str, pa.Table]:
    """Return rows of CALLS in their committed form, as tables by file name.

    Rows are sorted by sample and by the order of responses. Intents that got a response are left out, and so are tokens
    that `samples`, rows of the rollout table, already contain. Long results go into a table of their own.
    """
    calls = calls.filter(pa.array(_is_final(calls), pa.bool_()))
    calls = calls.sort_by([("group_id", "ascending"), ("sample_index", "ascending"), ("order", "ascending")])
    long = [text is not None and len(text) > LONG for text in calls["result"].to_pylist()]
    texts = [text if is_long else None for text, is_long in zip(calls["result"].to_pylist(), long, strict=True)]
    results = {_sha256(text): text for text in texts if text is not None}
    digests = [None if text is None else _sha256(text) for text in texts]
    calls = _set(calls, "result_digest", pa.array(digests, pa.string()))
    calls = _set(calls, "result", pc.if_else(pa.array(long, pa.bool_()), pa.scalar(None, pa.string()), calls["result"]))
    columns = [samples[name].to_pylist() for name in ("group_id", "sample_index", "segments")]
    lengths = pc.list_value_length(samples["response_ids"]).to_pylist()
    in_samples = {
        (group_id, index, call)
        for group_id, index, segments, tokens in zip(*columns, lengths, strict=True)
        for call in _calls_in(segments, tokens)
    }
    keys = zip(*(calls[name].to_pylist() for name in ("group_id", "sample_index", "call")), strict=True)
    own = pa.array([None if key in in_samples else row for row, key in enumerate(keys)], pa.int64())
    for name in _SAMPLED:
        calls = _set(calls, name, calls[name].take(own))  # null in place of what a sample has
    named = {"sha256": list(results), "result": list(results.values())}
    tables = {CALLS_FILE: calls.combine_chunks()}
    return {**tables, RESULTS_FILE: pa.table(named, LONG_RESULTS)} if results else tables


def read_calls(
    calls: pa.Table, results: pa.Table | None, segments: Mapping[SampleKey, Sequence[Segment]]
) -> list[CallRecord]:
    """Return the records of a committed table. `segments`: those of its samples."""
    columns = () if results is None else (results[name].to_pylist() for name in LONG_RESULTS.names)
    long: dict[str | None, str] = dict(zip(*columns, strict=True))
    sampled = {(key, one.call): one for key, own in segments.items() for one in own if one.call is not None}
    records = []
    for row in calls.to_pylist():
        record = _record({**row, "result": long.get(row["result_digest"], row["result"])})
        if record.kind is CallKind.SAMPLE and record.segment is None and record.error is None:
            segment = sampled.get((record.key, record.call))
            if segment is not None:
                record = replace(record, segment=replace(segment, loss_mask=np.ones(len(segment), np.uint8)))
        records.append(record)
    return records


def uncertain_effects(calls: pa.Table) -> dict[SampleKey, str]:
    """Return an error for each sample that had a call with effects under way and no response to it, by sample key."""
    intents = calls.filter(pc.is_null(calls["order"]))
    if not intents.num_rows:
        return {}
    left = call_records(calls.filter(pa.array(_is_final(calls), pa.bool_())).filter(pc.field("order").is_null()))
    return {key: " ".join(map(_uncertain, records)) for key, records in by_sample(left).items()}


def _uncertain(intent: CallRecord) -> str:
    return (
        f"generate: UncertainEffect: {intent.description} was under way when its process was lost, and may have been "
        "done; this was not checked, because its group had failed."
    )


def _is_final(calls: pa.Table) -> list[bool]:
    """Return for each row whether it is a response, or an intent without a response."""
    rows = list(zip(*(calls[name].to_pylist() for name in ("group_id", "sample_index", "call", "order")), strict=True))
    answered = {row[:3] for row in rows if row[3] is not None}
    return [row[3] is not None or row[:3] not in answered for row in rows]


def _calls_in(segments: Sequence[Mapping[str, Any]] | None, tokens: int) -> list[str | None]:
    if segments is None:
        return [FIRST_CALL] if tokens else []
    return [segment["call"] for segment in segments]


def _record(row: Mapping[str, Any]) -> CallRecord:
    return CallRecord(
        row["group_id"],
        row["sample_index"],
        row["call"],
        CallKind(row["kind"]),
        row["name"],
        row["arguments_digest"],
        row["order"],
        row["turn"],
        row["arguments"],
        row["result"],
        row["error"],
        row["reason"],
        _segment(row),
        row["given_tokens"],
        row["started_at"],
        row["seconds"],
    )


def _segment(row: Mapping[str, Any]) -> Segment | None:
    if row["response_ids"] is None:
        return None
    support = row["kept_token_ids"]
    return Segment(
        np.asarray(row["response_ids"], np.int32),
        np.ones(len(row["response_ids"]), np.uint8),
        row["call"],
        np.asarray(row["log_probs"], np.float32),
        np.asarray(row["weight_versions"], np.int32),
        row["seed"],
        FinishReason(row["finish_reason"]),
        None if support is None else SamplingSupport.of(support),
        routes_of(row["routed_experts"]),
        row["seconds"],
        row["cached_tokens"],
    )


def _support_sets(support: SamplingSupport) -> list[np.ndarray]:
    return np.split(support.ids, np.cumsum(support.counts)[:-1]) if len(support) else []


def _set(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    return table.set_column(CALLS.names.index(name), CALLS.field(name), column)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
