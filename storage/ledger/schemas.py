"""The tables that steps write. One row a sample, unless said; token columns hold one element a response token.

A ledger outlives the code that wrote it. A column that a schema gets later is nullable, and is read as null from tables
that were written without it; what a reader makes of null is said where the column is declared.
"""

from enum import StrEnum

import pyarrow as pa

from cairn.storage.ledger.commits import Step


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


DATA = "data"
"""What `engine` says of a row whose response the run's data hold, in the place of a rollout engine's name."""

MEASURED = frozenset({"engine", "seconds", "cached_tokens"})
"""Columns of samples that say how a row came about: they differ between runs that make the same."""
NOT_MADE = MEASURED | {"started_at"}
"""Such columns of any table."""

_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_SEGMENTS = pa.list_(
    pa.struct(
        [
            ("tokens", pa.int32()),  # of the response, in order
            ("call", pa.string()),  # id of the call that sampled them; null: the world gave them
            ("seed", pa.uint64()),  # of that call
            ("finish_reason", pa.string()),  # cairn.engines.types.types.FinishReason
        ]
    )
)
"""What a response is made of; null: one segment, sampled with the row's seed."""


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
    ("segments", _SEGMENTS),
    ("log_probs", _FLOATS),  # of the response tokens under the rollout engine; 0 where the world gave them
    ("loss_mask", pa.list_(pa.uint8())),  # 1: trained on, unless the group's max_age in `filter` says otherwise
    ("weight_versions", _IDS),  # that each response token was sampled from, or that read it where the world gave it
    ("finish_reason", pa.string()),  # cairn.engines.types.types.FinishReason
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),  # of the first call; those of others come from it
    ("engine", pa.string()),  # name of the rollout engine that generated last, or DATA
    ("seconds", pa.float32()),  # from the sample's admission to its end
    ("cached_tokens", pa.int64()),  # of those that the engine was given, the ones in its prefix cache
    ("label", pa.string()),  # expected answer
    ("metadata", pa.string()),  # JSON object of the data row
    nullable=frozenset({"segments", "error", "label", "metadata"}),
)
"""`rollout`: what was sampled."""

KEPT = pa.field("kept_token_ids", pa.list_(pa.large_list(pa.int32())), nullable=True)
"""A column of `rollout` where sampling is cut down to the most probable tokens (top-p, top-k): for each response token,
the ids that were left to draw it from, ascending; empty where that was the whole vocabulary."""


TRAJECTORIES = pa.field("trajectories", pa.list_(pa.int32()), nullable=True)
"""A column of `rollout`, of `eval` and of their write-ahead logs where a sample has several trajectories, or one with a
prompt of its own: how many tokens of its response each has, one after the other. Each is a sequence after a prompt, and
the last one is what `response_text` tells. Null: it has one."""

TRAJECTORY_PROMPTS = pa.field("trajectory_prompts", pa.list_(pa.list_(pa.int32())), nullable=True)
"""Another one, beside `trajectories`, where a trajectory has a prompt of its own: that of each of them, null for those
that come after the row's. Null: all do."""

TRAJECTORY_REWARDS = pa.field("trajectory_rewards", pa.list_(pa.float64()), nullable=True)
"""Another one, where user code gave rewards while it generated: that of each trajectory, of a sample that has one too;
null for those without. And one of `reward`, where the grader gives each trajectory its own. Null: none has one."""

TRAJECTORY_ROLES = pa.field("trajectory_roles", pa.list_(pa.string()), nullable=True)
"""Another one, where trajectories have roles: that of each, null for those without. Null: none has one."""

TURN_REWARDS = pa.field("turn_rewards", pa.list_(pa.float64()), nullable=True)
"""Another one, where user code gave segments rewards: that of each of the row's segments, null for those without. Null:
none has one."""

RETOLD = pa.field("retold_tokens", pa.int32(), nullable=True)
"""Another one, where a later prompt of the sample tells in other tokens what the policy had sampled: how many tokens of
its response that befell. Null: none."""

SEQUENCES = (TRAJECTORIES, TRAJECTORY_PROMPTS, TRAJECTORY_REWARDS, TRAJECTORY_ROLES, TURN_REWARDS, RETOLD)
"""What the trajectories of a sample are."""

ROUTED = pa.field(
    "routed_experts",
    pa.struct([("layers", pa.int16()), ("top_k", pa.int16()), ("bytes", pa.int8()), ("experts", pa.large_binary())]),
    nullable=True,
)
"""A column of `rollout` where `algorithm.use_rollout_routing_replay` asks for it: the experts that the model of the
rollout engine chose for each token that it read, prompt and response but for the last token, of each trajectory one
after the other: [tokens, layers, top_k] unsigned integers of as many `bytes`, little-endian, one row after the other.
Layers are those with experts. Null: they are not known, and the trainer's model chooses by itself."""

IMAGES = pa.field(
    "images",
    pa.list_(
        pa.struct(
            [
                ("sha256", pa.string()),  # of its bytes, which lie beside the table
                ("height", pa.int32()),  # in pixels, as the model sees it
                ("width", pa.int32()),
            ]
        )
    ),
    nullable=True,
)
"""A column of `rollout` where prompts may have images, and of `eval`: those of the sample's prompt, in order; the bytes
of an evaluation's are in its benchmark. Null: it has none."""

IMAGE_BYTES = _schema(("sha256", pa.string()), ("data", pa.binary()))
"""Of the file beside the table of a `rollout` whose samples have images (`cairn.storage.ledger.layout.IMAGES_FILE`):
one row an image. `data` is as the data set has it, encoded."""


CALLS = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("order", pa.int32()),  # which answer of the sample it was; null: an intent, which was not answered
    ("call", pa.string()),  # id of the call in the sample, as `segments` has it
    ("kind", pa.string()),  # cairn.engines.types.trajectories.CallKind
    ("name", pa.string()),  # of the tool or grader
    ("turn", pa.int32()),  # answers of the policy before it
    ("arguments", pa.string()),  # JSON; of the policy the SHA-256 of the tokens it went on from; null: of the clock
    ("arguments_digest", pa.string()),
    ("result", pa.string()),  # JSON; null: it failed, the policy answered, or the result is long
    ("result_digest", pa.string()),  # SHA-256 of a long result, which lies beside the table (LONG_RESULTS)
    ("error", pa.string()),
    ("reason", pa.string()),  # of a tool that failed, cairn.engines.agents.tools.errors.Reason
    ("given_tokens", pa.int32()),  # that the policy went on from
    ("response_ids", _IDS),  # null: those of the sample's segment of this call, as all that follows to `finish_reason`
    ("log_probs", _FLOATS),
    ("weight_versions", _IDS),
    ("kept_token_ids", KEPT.type),
    ("routed_experts", ROUTED.type),
    ("seed", pa.uint64()),
    ("finish_reason", pa.string()),
    ("cached_tokens", pa.int64()),
    ("started_at", pa.float64()),  # seconds since the epoch
    ("seconds", pa.float32()),
    nullable=frozenset(
        {
            *("order", "arguments", "result", "result_digest", "error", "reason"),
            *("response_ids", "log_probs", "weight_versions", "kept_token_ids", "routed_experts", "seed"),
            "finish_reason",
        }
    ),
)
"""Beside the table of a `rollout` whose samples' code may ask more than once
(`cairn.storage.ledger.layout.CALLS_FILE`), and of the log of calls: a row for each of their calls, in the order in
which they were answered."""

LONG_RESULTS = _schema(("sha256", pa.string()), ("result", pa.string()))
"""Beside it (`cairn.storage.ledger.layout.RESULTS_FILE`): long results of calls, each once."""


def rollout_schema(*, cut: bool, several: bool = False, routed: bool = False, images: bool = False) -> pa.Schema:
    """Of the table that `rollout` writes, `cut`: with what its tokens were drawn from, `several`: with trajectories,
    `routed`: with the experts of each token, `images`: with those of prompts."""
    sequences = ((field, several) for field in SEQUENCES)
    asked = ((KEPT, cut), *sequences, (ROUTED, routed), (IMAGES, images))
    return pa.schema([*ROLLOUT, *(field for field, is_asked in asked if is_asked)])


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

RAW_REWARD = pa.field("raw_reward", pa.float32(), nullable=True)
"""A column of `reward` where rewards are shaped (`reward.overlong_buffer_len`): what the grader said. Null where there
is no reward."""

FILTER = _schema(
    ("group_id", pa.int64()),
    ("iteration", pa.int64()),  # where its samples lie: iteration …
    ("shard", pa.string()),  # … and shard
    ("kept", pa.bool_()),  # passed the filter, or trained on all the same
    ("disposition", pa.string()),  # Disposition
    ("reason", pa.string()),  # why it was dropped
    ("mean_reward", pa.float32()),  # of the group's rewards
    ("std_reward", pa.float32()),
    ("age", pa.int32()),  # of its newest tokens, in publications; null: not known
    ("max_age", pa.int32()),  # of the tokens that are trained on; null: of any age
    nullable=frozenset({"reason", "mean_reward", "std_reward", "age", "max_age"}),
)
"""`filter`: one row a group."""

PRIORITY = pa.field("priority", pa.float64(), nullable=True)
"""A column of `filter` where the filter gave a group one: what the buffer policy may put it by."""

BUFFER_KEY = pa.field("key", pa.string(), nullable=True)
"""A column of `filter` where there is a `rollout.buffer_key`: what the group's metadata has under it, as JSON."""

REMOVED = pa.field("removed", pa.list_(pa.int32()), nullable=True)
"""A column of `filter` where there is a `rollout.rollout_sample_filter_path`: the samples of a trained group, by their
places in it, whose tokens are not trained on, though their rewards count."""

STALE_TOKENS = pa.field("stale_tokens", pa.int32(), nullable=True)
"""A column of `filter` where a group has any: its tokens that are older than `max_age`."""

STALE_WEIGHTS = pa.field("stale_weights", pa.list_(pa.float32()), nullable=True)
"""A column of `filter` where such tokens are trained on all the same: the weights of those of the ages `max_age` + 1,
`max_age` + 2, …; null: 0."""

SCORE = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("log_probs", _FLOATS),  # under the policy before the update
    ("ref_log_probs", _FLOATS),  # under the reference model
    ("teacher_log_probs", _FLOATS),  # under the teacher; the column is there where the algorithm reads it
    ("teacher_top_log_probs", pa.list_(pa.large_list(pa.float32()))),  # of its most probable tokens; likewise …
    (
        "teacher_top_ids",
        pa.list_(pa.large_list(pa.int32())),
    ),  # … and which they are: `cairn.engines.training.log_probs`
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
    ("ages", _IDS),  # of each token when it is trained on, in publications; null: not known
    nullable=frozenset({"ages"}),
)
"""`advantage`: the samples of one update, in the order in which its optimizer steps consume them."""

EVAL = _schema(
    ("benchmark", pa.string()),
    ("prompt_index", pa.int64()),
    ("sample_index", pa.int32()),
    ("prompt_text", pa.string()),
    ("response_text", pa.string()),
    ("response_ids", _IDS),
    ("log_probs", _FLOATS),  # of the response tokens under the rollout engine, 0 where the world gave them
    ("segments", _SEGMENTS),
    ("reward", pa.float32()),  # null: failed
    ("label", pa.string()),
    ("finish_reason", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),
    ("weight_version", pa.int64()),
    nullable=frozenset({"log_probs", "segments", "reward", "label", "error"}),
)
"""`eval`: one row a sample of a benchmark."""

GENERATED_EVAL = pa.schema(
    [
        *_schema(
            ("group_id", pa.int64()),  # the prompt's index
            ("sample_index", pa.int32()),
            ("response_ids", _IDS),
            ("log_probs", _FLOATS),
            ("segments", _SEGMENTS),
            ("finish_reason", pa.string()),
            ("error", pa.string()),
            ("seconds", pa.float32()),
            nullable=frozenset({"log_probs", "segments", "error", "seconds"}),
        ),
        *SEQUENCES,
    ]
)
"""Of the write-ahead log of `eval`: what is generated, and graded when all is."""

EVALUATED = _schema(
    ("benchmark", pa.string()),
    ("prompt_index", pa.int64()),  # row of the benchmark, from 0
    ("prompt_id", pa.string()),  # what names the row; its number where nothing does
    ("sample_index", pa.int32()),
    ("prompt_text", pa.string()),
    ("prompt_ids", _IDS),
    ("response_text", pa.string()),
    ("response_ids", _IDS),
    ("log_probs", _FLOATS),  # of the response tokens; null: taken over from a run that did not keep them
    ("answer", pa.string()),  # what the grader took for the answer, where it says
    ("reward", pa.float64()),  # null: failed; as the grader gave it
    ("components", pa.string()),  # JSON object of what else the grader said
    ("label", pa.string()),
    ("metadata", pa.string()),  # JSON object of the row
    ("grader", pa.string()),
    ("grader_version", pa.string()),
    ("finish_reason", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),
    ("seconds", pa.float32()),  # from the sample's admission to its end
    nullable=frozenset(
        {"prompt_ids", "log_probs", "answer", "reward", "components", "label", "metadata", "error", "seconds"}
    ),
)
"""Of a result in `evals/`: one row a sample, question after question."""

GENERATED_EVALUATION = _schema(
    ("group_id", pa.int64()),  # the question's row
    ("sample_index", pa.int32()),
    ("response_ids", _IDS),
    ("log_probs", _FLOATS),
    ("finish_reason", pa.string()),
    ("error", pa.string()),
    ("seconds", pa.float32()),
    nullable=frozenset({"error"}),
)
"""Of the write-ahead log of a result: what is generated, and graded when all is."""

SCHEMAS: dict[str, pa.Schema] = {
    Step.ROLLOUT: ROLLOUT,
    Step.REWARD: REWARD,
    Step.FILTER: FILTER,
    Step.SCORE: SCORE,
    Step.ADVANTAGE: ADVANTAGE,
    Step.EVAL: EVAL,
}
"""Of the tables that steps write."""


def complete(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """A table of a schema, with the columns that an earlier version of the schema was without: all null. They stand
    where the schema has them."""
    lacking = [field for field in schema if field.nullable and field.name not in table.column_names]
    if not lacking:
        return table
    for field in lacking:
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    order = [name for name in schema.names if name in table.column_names]
    return table.select([*order, *(name for name in table.column_names if name not in order)])
