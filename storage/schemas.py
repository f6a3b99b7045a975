"""The tables that steps write. One row a sample, unless said; token columns hold one element a response token."""

from enum import StrEnum

import pyarrow as pa


class Status(StrEnum):
    """How a sample ended."""

    COMPLETED = "completed"
    """The model ended its response."""
    TRUNCATED = "truncated"
    """The response reached the longest allowed length."""
    ABORTED = "aborted"
    """Generation was stopped on purpose; the response is a part."""
    FAILED = "failed"
    """Generation or grading failed; `error` says how. It has no reward."""


class Disposition(StrEnum):
    """What becomes of a group."""

    TRAIN = "train"
    """Trained on in this iteration."""
    BUFFER = "buffer"
    """Kept, but more than this iteration needs: the next one may take it."""
    CONTINUE = "continue"
    """Not finished when its shard was: a later round goes on with it."""
    DROP = "drop"
    """Filtered out; `reason` says why."""


MEASURED = frozenset({"engine", "seconds", "cached_tokens"})
"""Columns that say how a row came about: they differ between runs that make the same."""

_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())


def _schema(*fields: tuple[str, pa.DataType], nullable: frozenset[str] = frozenset()) -> pa.Schema:
    return pa.schema([pa.field(name, type_, nullable=name in nullable) for name, type_ in fields])


ROLLOUT = _schema(
    ("group_id", pa.int64()),  # index of the prompt draw, unique in the run
    ("sample_index", pa.int32()),  # position in the group
    ("rollout_id", pa.int64()),  # segments of one trajectory share it
    ("prompt_index", pa.int64()),  # row of the data set
    ("epoch", pa.int32()),  # pass through the data set
    ("prompt_text", pa.string()),
    ("prompt_ids", _IDS),
    ("response_text", pa.string()),
    ("response_ids", _IDS),
    ("log_probs", _FLOATS),  # of the response tokens under the rollout engine
    ("loss_mask", pa.list_(pa.uint8())),  # 1: trained on
    ("weight_versions", _IDS),  # that each response token was sampled from
    ("finish_reason", pa.string()),  # engines.types.FinishReason
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),
    ("engine", pa.string()),  # name of the rollout engine that generated last
    ("seconds", pa.float32()),  # from the sample's admission to its end
    ("cached_tokens", pa.int64()),  # of those that the engine was given, the ones in its prefix cache
    ("label", pa.string()),  # expected answer
    ("metadata", pa.string()),  # JSON object of the data row
    nullable=frozenset({"error", "label", "metadata"}),
)
"""`rollout`: what was sampled."""

REWARD = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("reward", pa.float32()),  # null: failed, or of a group that is not finished
    ("components", pa.string()),  # JSON object of partial rewards
    ("grader", pa.string()),
    ("grader_version", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    nullable=frozenset({"reward", "components", "error"}),
)
"""`reward`: one row for each row of the shard's rollout table, in its order."""

FILTER = _schema(
    ("group_id", pa.int64()),
    ("iteration", pa.int64()),  # where its samples lie: iteration …
    ("shard", pa.string()),  # … and shard
    ("kept", pa.bool_()),  # passed the filter
    ("disposition", pa.string()),  # Disposition
    ("reason", pa.string()),  # why it was dropped
    ("mean_reward", pa.float32()),  # of the group's rewards
    ("std_reward", pa.float32()),
    nullable=frozenset({"reason", "mean_reward", "std_reward"}),
)
"""`filter`: one row a group."""

SCORE = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("log_probs", _FLOATS),  # under the policy before the update
    ("ref_log_probs", _FLOATS),  # under the reference model
    ("teacher_log_probs", _FLOATS),  # under the teacher; the column is there where a teacher is
    ("values", _FLOATS),  # of the critic before the update; the column is there where a critic is
    nullable=frozenset({"log_probs", "ref_log_probs"}),
)
"""`score`: log-probs that the algorithm does not use are null."""

ADVANTAGE = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("reward", pa.float32()),  # as the update uses it
    ("advantages", _FLOATS),
    ("returns", _FLOATS),
)
"""`advantage`: the samples of one update, in the order in which its optimizer steps consume them."""

EVAL = _schema(
    ("benchmark", pa.string()),
    ("prompt_index", pa.int64()),
    ("sample_index", pa.int32()),
    ("prompt_text", pa.string()),
    ("response_text", pa.string()),
    ("response_ids", _IDS),
    ("reward", pa.float32()),  # null: failed
    ("label", pa.string()),
    ("finish_reason", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),
    ("weight_version", pa.int64()),
    nullable=frozenset({"reward", "label", "error"}),
)
"""`eval`: one row a sample of a benchmark."""
