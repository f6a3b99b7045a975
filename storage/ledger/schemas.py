"""Schemas of the tables that steps write. A row is a sample unless noted; token columns hold one element for each
response token.

A ledger outlives the code that wrote it. A column that was added to a schema later is nullable and reads as null from
older tables. The declaration of such a column says what null means.
"""

from enum import StrEnum

import pyarrow as pa

from cairn.storage.ledger.commits import Step


class Status(StrEnum):
    """Reason why a sample ended."""

    COMPLETED = "completed"
    """The model ended its response."""
    TRUNCATED = "truncated"
    """The response reached the length limit."""
    ABORTED = "aborted"
    """Generation was stopped deliberately; the response is partial."""
    FAILED = "failed"
    """Generation or grading failed; `error` holds the reason. The sample has no reward."""


class Disposition(StrEnum):
    """Use of a group."""

    TRAIN = "train"
    """Trained on in this iteration."""
    BUFFER = "buffer"
    """Buffered because this iteration does not need it; the next one may use it."""
    CONTINUE = "continue"
    """Unfinished when its shard finished; a later round resumes it."""
    DROP = "drop"
    """Filtered out; `reason` holds the reason."""


DATA = "data"
"""Value of `engine` in rows whose response comes from the run's data and not from a rollout engine."""

MEASURED = frozenset({"engine", "seconds", "cached_tokens"})
"""Columns of samples with measurements of the generation. They differ between runs that make the same samples."""
ALL_MEASURED = MEASURED | {"started_at"}
"""Measured columns of any table."""

_IDS = pa.list_(pa.int32())
_FLOATS = pa.list_(pa.float32())
_SEGMENTS = pa.list_(
    pa.struct(
        [
            ("tokens", pa.int32()),  # of the response, in order
            ("call", pa.string()),  # id of the call that sampled them; null: from the environment
            ("seed", pa.uint64()),  # of that call
            ("finish_reason", pa.string()),  # cairn.engines.types.types.FinishReason
        ]
    )
)
"""Pieces of a response. Null: one segment, sampled with the row's seed."""


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
    ("log_probs", _FLOATS),  # of the response tokens under the rollout engine; 0 for tokens from the environment
    ("loss_mask", pa.list_(pa.uint8())),  # 1: trained on, unless the group's max_age in `filter` says otherwise
    ("weight_versions", _IDS),  # that sampled, or else read, each token
    ("finish_reason", pa.string()),  # cairn.engines.types.types.FinishReason
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),  # of the first call; those of others come from it
    ("engine", pa.string()),  # name of the rollout engine that generated last, or DATA
    ("seconds", pa.float32()),  # from acceptance of the sample to its end
    ("cached_tokens", pa.int64()),  # prompt tokens that the engine had in its prefix cache
    ("label", pa.string()),  # expected answer
    ("metadata", pa.string()),  # JSON object of the data row
    nullable=frozenset({"segments", "error", "label", "metadata"}),
)
"""Table of `rollout`: the samples."""

SUPPORT = pa.field("kept_token_ids", pa.list_(pa.large_list(pa.int32())), nullable=True)
"""Sampling support, a column of `rollout` under top-p or top-k sampling: for each response token the ids from which it
was drawn, ascending. Empty if the support was the whole vocabulary."""


TRAJECTORIES = pa.field("trajectories", pa.list_(pa.int32()), nullable=True)
"""A column of `rollout`, of `eval` and of their write-ahead logs, if a sample has several trajectories or one with its
own prompt: the number of response tokens of each trajectory, in order. Each trajectory is a token sequence after a
prompt. `response_text` is the text of the last one. Null: the sample has one trajectory."""

TRAJECTORY_PROMPTS = pa.field("trajectory_prompts", pa.list_(pa.list_(pa.int32())), nullable=True)
"""A column of the same tables, if a trajectory has its own prompt: the prompt of each trajectory, null for those that
follow the row's prompt. Null: all follow the row's prompt."""

TRAJECTORY_REWARDS = pa.field("trajectory_rewards", pa.list_(pa.float64()), nullable=True)
"""A column of the same tables, if user code assigned rewards during generation: the reward of each trajectory, also if
the sample has only one; null for those without. Also a column of `reward`, if the grader rewards each trajectory
separately. Null: no trajectory has its own reward."""

TRAJECTORY_ROLES = pa.field("trajectory_roles", pa.list_(pa.string()), nullable=True)
"""A column of the same tables, if trajectories have roles: the role of each, null for those without. Null: none has
one."""

TURN_REWARDS = pa.field("turn_rewards", pa.list_(pa.float64()), nullable=True)
"""A column of the same tables, if user code assigned rewards to segments: the reward of each segment of the row, null
for those without. Null: none has one."""

RETOKENIZED = pa.field("retold_tokens", pa.int32(), nullable=True)
"""A column of the same tables, if a later prompt of the sample, or the returned trajectory, tokenizes sampled text in
another way: the number of response tokens that this affects. Null: none."""

TRAJECTORY_INFOS = pa.field("trajectory_infos", pa.list_(pa.string()), nullable=True)
"""A column of the same tables, if user code set values for the grader: those of each trajectory as a JSON object, null
for those without. Null: no trajectory has any."""

SEQUENCES = (
    *(TRAJECTORIES, TRAJECTORY_PROMPTS, TRAJECTORY_REWARDS, TRAJECTORY_ROLES, TURN_REWARDS, RETOKENIZED),
    TRAJECTORY_INFOS,
)
"""Columns that describe the trajectories of a sample."""

ROUTED = pa.field(
    "routed_experts",
    pa.struct([("layers", pa.int16()), ("top_k", pa.int16()), ("bytes", pa.int8()), ("experts", pa.large_binary())]),
    nullable=True,
)
"""A column of `rollout` if `algorithm.use_rollout_routing_replay` is set: the experts that the rollout engine's model
chose for each token that it read, that is, prompt and response without the last token, one trajectory after the other.
Shape [tokens, layers, top_k], row-major, unsigned integers of `bytes` bytes each, little-endian. `layers` counts the
layers with experts. Null: unknown; the trainer's model does its own routing."""

IMAGES = pa.field(
    "images",
    pa.list_(
        pa.struct(
            [
                ("sha256", pa.string()),  # of its bytes, which are stored next to the table
                ("height", pa.int32()),  # in pixels, as the model sees it
                ("width", pa.int32()),
            ]
        )
    ),
    nullable=True,
)
"""A column of `rollout` if prompts may have images, and of `eval`: the images of the sample's prompt, in order. The
bytes of an evaluation's images are in its benchmark. Null: the prompt has no images."""

IMAGE_BYTES = _schema(("sha256", pa.string()), ("data", pa.binary()))
"""Table of the images of a `rollout`, stored next to its table (`cairn.storage.ledger.layout.IMAGES_FILE`): one row for
each image. `data` are the encoded bytes as in the data set."""


CALLS = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("order", pa.int32()),  # position of its response among the sample's; null: an intent, which has no response
    ("call", pa.string()),  # id of the call in the sample, as `segments` has it
    ("kind", pa.string()),  # cairn.engines.types.trajectories.CallKind
    ("name", pa.string()),  # of the tool or grader
    ("turn", pa.int32()),  # number of policy responses before it
    (
        "arguments",
        pa.string(),
    ),  # JSON; of the policy: SHA-256 of `given_tokens`; null: a call to the clock
    ("arguments_digest", pa.string()),
    ("result", pa.string()),  # JSON; null: it failed, it is a policy response, or the result is long
    ("result_digest", pa.string()),  # SHA-256 of a long result, which is stored next to the table (LONG_RESULTS)
    ("error", pa.string()),
    ("reason", pa.string()),  # why a tool failed: cairn.engines.agents.tools.errors.Reason
    ("given_tokens", pa.int32()),  # number of tokens that the policy continued from
    (
        "response_ids",
        _IDS,
    ),  # null: those of the sample's segment of this call; likewise up to `finish_reason`
    ("log_probs", _FLOATS),
    ("weight_versions", _IDS),
    ("kept_token_ids", SUPPORT.type),
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
"""Table of the calls of the samples' code, stored next to the table of a `rollout` whose samples may make several
(`cairn.storage.ledger.layout.CALLS_FILE`), and schema of the log of calls. One row for each call, in the order in which
the responses arrived."""

LONG_RESULTS = _schema(("sha256", pa.string()), ("result", pa.string()))
"""Table of long results of calls, each once, stored next to the calls (`cairn.storage.ledger.layout.RESULTS_FILE`)."""


def rollout_schema(*, cut: bool, several: bool = False, routed: bool = False, images: bool = False) -> pa.Schema:
    """Return the schema of the table that `rollout` writes.

    Args:
        cut: include the sampling support of each token.
        several: include the trajectories.
        routed: include the experts of each token.
        images: include the images of the prompts.
    """
    sequences = ((field, several) for field in SEQUENCES)
    requested = ((SUPPORT, cut), *sequences, (ROUTED, routed), (IMAGES, images))
    return pa.schema([*ROLLOUT, *(field for field, included in requested if included)])


REWARD = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("reward", pa.float32()),  # null: failed, or its group is not finished
    ("components", pa.string()),  # JSON object of partial rewards
    ("grader", pa.string()),
    ("grader_version", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    nullable=frozenset({"reward", "components", "error"}),
)
"""Table of `reward`: one row for each row of the shard's rollout table, in the same order."""

RAW_REWARD = pa.field("raw_reward", pa.float32(), nullable=True)
"""A column of `reward` if rewards are shaped (`reward.overlong_buffer_len`): the grader's reward before shaping. Null
if there is no reward."""

FILTER = _schema(
    ("group_id", pa.int64()),
    ("iteration", pa.int64()),  # place of its samples: iteration …
    ("shard", pa.string()),  # … and shard
    ("kept", pa.bool_()),  # passed the filter, or is trained on without passing it
    ("disposition", pa.string()),  # Disposition
    ("reason", pa.string()),  # why it was dropped
    ("mean_reward", pa.float32()),  # of the group's rewards
    ("std_reward", pa.float32()),
    ("age", pa.int32()),  # of its newest tokens, in publications; null: unknown
    ("max_age", pa.int32()),  # of the tokens that are trained on; null: no limit
    nullable=frozenset({"reason", "mean_reward", "std_reward", "age", "max_age"}),
)
"""Table of `filter`: one row for each group."""

PRIORITY = pa.field("priority", pa.float64(), nullable=True)
"""A column of `filter` if the filter gave a group a priority, which the buffer policy may sort by."""

BUFFER_KEY = pa.field("key", pa.string(), nullable=True)
"""A column of `filter` if `rollout.buffer_key` is set: the value under this key in the group's metadata, as JSON."""

REMOVED = pa.field("removed", pa.list_(pa.int32()), nullable=True)
"""A column of `filter` if `rollout.rollout_sample_filter_path` is set: positions of samples within a trained group
whose tokens are not trained on, although their rewards count."""

STALE_TOKENS = pa.field("stale_tokens", pa.int32(), nullable=True)
"""A column of `filter` if a group has stale tokens: the number of its tokens that are older than `max_age`."""

STALE_WEIGHTS = pa.field("stale_weights", pa.list_(pa.float32()), nullable=True)
"""A column of `filter` if stale tokens are trained on: the weights of tokens of the ages `max_age` + 1, `max_age` + 2,
…. Null: 0."""

SCORE = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("log_probs", _FLOATS),  # under the policy before the update
    ("ref_log_probs", _FLOATS),  # under the reference model
    ("teacher_log_probs", _FLOATS),  # under the teacher; the column exists if the algorithm reads it
    ("teacher_top_log_probs", pa.list_(pa.large_list(pa.float32()))),  # of its most probable tokens, likewise …
    (
        "teacher_top_ids",
        pa.list_(pa.large_list(pa.int32())),
    ),  # … and their ids: `cairn.engines.training.log_probs`
    ("values", _FLOATS),  # of the critic before the update; the column exists if there is a critic
    nullable=frozenset({"log_probs", "ref_log_probs"}),
)
"""Table of `score`. Log-probs that the algorithm does not use are null."""

ADVANTAGE = _schema(
    ("group_id", pa.int64()),
    ("sample_index", pa.int32()),
    ("reward", pa.float32()),  # as the update uses it
    ("advantages", _FLOATS),
    ("returns", _FLOATS),
    ("ages", _IDS),  # of each token when it is trained on, in publications; null: unknown
    nullable=frozenset({"ages"}),
)
"""Table of `advantage`: the samples of one update, in the order in which its optimizer steps consume them."""

EVALUATED = _schema(
    ("benchmark", pa.string()),
    ("prompt_index", pa.int64()),  # row of the benchmark, from 0
    ("prompt_id", pa.string()),  # identifier of the row; its number if it has none
    ("sample_index", pa.int32()),
    ("prompt_text", pa.string()),
    ("prompt_ids", _IDS),
    ("response_text", pa.string()),
    ("response_ids", _IDS),
    (
        "log_probs",
        _FLOATS,
    ),  # under the engine; 0 for tokens from the environment; null: not stored
    ("answer", pa.string()),  # answer that the grader found in the response; null: not reported
    ("reward", pa.float64()),  # null: failed; otherwise as the grader returned it
    ("components", pa.string()),  # JSON object of the grader's other results
    ("label", pa.string()),
    ("metadata", pa.string()),  # JSON object of the row
    ("grader", pa.string()),
    ("grader_version", pa.string()),
    ("finish_reason", pa.string()),
    ("status", pa.string()),  # Status
    ("error", pa.string()),
    ("seed", pa.uint64()),
    ("seconds", pa.float32()),  # from acceptance of the sample to its end
    nullable=frozenset(
        {"prompt_ids", "log_probs", "answer", "reward", "components", "label", "metadata", "error", "seconds"}
    ),
)
"""Table of a result in `evals/`: one row for each sample, question after question."""

GRADED_EVAL = pa.schema([*EVALUATED, pa.field("segments", _SEGMENTS), *SEQUENCES])
"""Rows of any evaluation, as it computes them. A result and the step `eval` store some of the columns each."""

EVAL = pa.schema(
    [
        *map(GRADED_EVAL.field, ("benchmark", "prompt_index", "sample_index", "prompt_text")),
        *map(GRADED_EVAL.field, ("response_text", "response_ids", "log_probs", "segments")),
        pa.field("reward", pa.float32()),  # null: failed
        *map(GRADED_EVAL.field, ("label", "finish_reason", "status", "error", "seed")),
        pa.field("weight_version", pa.int64(), nullable=False),
    ]
)
"""Table of `eval`: one row for each sample of a benchmark."""

GENERATED_EVAL = pa.schema(
    [
        pa.field("group_id", pa.int64(), nullable=False),  # the prompt's index
        *map(GRADED_EVAL.field, ("sample_index", "response_ids", "log_probs", "segments")),
        *map(GRADED_EVAL.field, ("finish_reason", "error", "seconds")),
        *SEQUENCES,
    ]
)
"""Schema of the write-ahead log of any evaluation: generated samples, which are graded once all are generated."""

SCHEMAS: dict[str, pa.Schema] = {
    Step.ROLLOUT: ROLLOUT,
    Step.REWARD: REWARD,
    Step.FILTER: FILTER,
    Step.SCORE: SCORE,
    Step.ADVANTAGE: ADVANTAGE,
    Step.EVAL: EVAL,
}
"""Schemas of the tables that steps write, by step."""


def complete(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table with the nullable columns of the schema that it lacks, all null, in the schema's order."""
    lacking = [field for field in schema if field.nullable and field.name not in table.column_names]
    if not lacking:
        return table
    for field in lacking:
        table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    order = [name for name in schema.names if name in table.column_names]
    return table.select([*order, *(name for name in table.column_names if name not in order)])
