"""Views of the samples of an iteration: `groups`, `samples`, `segments`, `calls`, `rewards`, `advantages`, `tokens`."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# Building blocks of views: a SELECT over the tables of one step, `base`, and joins.
#
# The expression of a column names the joins that it needs by their alias. So the view of a query consists of the
# columns that the query names, and of the joins of these columns.


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    type: str
    """DuckDB type."""
    about: str
    sql: str


@dataclass(frozen=True)
class EquivalentJoin:
    """A join that usually has exactly one row for each row of the base, and then can replace the base."""

    alias: str
    base: str
    columns: frozenset[str]
    """Columns of the base that the join has, too, with the same values."""


@dataclass(frozen=True)
class View:
    """A view of the ledger."""

    name: str
    about: str
    """Meaning of a row."""
    base: str
    columns: Mapping[str, Column]
    joins: Mapping[str, str] = field(default_factory=dict)
    """Joins by alias. Each may use only those before it."""
    anchor: str = ""
    """Column that unnests and so determines the rows. It is always selected."""
    twin: EquivalentJoin | None = None

    def select(self, names: Collection[str], *, same_rows: bool = False) -> str:
        """Return the SELECT of some columns, in the view's order; its first column if no column is named.

        `same_rows`: the base and its twin have exactly one row for each row of the other.
        """
        chosen = [name for name in self.columns if name in names or name == self.anchor] or [next(iter(self.columns))]
        items = ", ".join(f'{self.columns[name].sql} AS "{name}"' for name in chosen)
        joins: dict[str, str] = {}
        for alias, join in reversed(list(self.joins.items())):
            if re.search(rf"\b{alias}\.", " ".join([items, *joins.values()])):
                joins = {alias: join, **joins}
        if same_rows and self.twin is not None and self.twin.alias in joins:
            others = " ".join(join for alias, join in joins.items() if alias != self.twin.alias)
            if set(re.findall(r"\bb\.(\w+)", items + others)) <= self.twin.columns:
                renamed = re.sub(rf"\b{self.twin.alias}\.", "b.", items)
                return f"SELECT {renamed} FROM {self.twin.base} {others}"
        return f"SELECT {items} FROM {self.base} {' '.join(joins.values())}"


def column(type_: str, sql: str, about: str) -> Column:
    """Return a column. The arguments are in the order that reads best in a view's definition."""
    return Column(type_, about, sql)


OF_RUN = {
    "run": column(
        "VARCHAR", "b.run", "the run; iterations that a fork shares appear under the fork and under its parent"
    ),
    "owner": column("VARCHAR", "b.owner", "the run that made it: `run = owner` counts each thing once"),
}
"""Columns of every view of data that runs made."""


def time(name: str) -> str:
    """Return the timestamp expression of a column of `b` that holds seconds since the epoch."""
    return f"to_timestamp(b.{name})"


OF_PLACE = {
    **OF_RUN,
    "iteration": column("BIGINT", "b.iteration", "iteration in which it was made"),
    "shard": column("VARCHAR", "b.shard", "shard of the rollout that generated it"),
}
OF_SAMPLE = {
    **OF_PLACE,
    "group_id": column("BIGINT", "b.group_id", "index of the prompt draw, unique in the run"),
    "sample_index": column("INTEGER", "b.sample_index", "position in the group"),
}
_TRAINED = "any_value(iteration) FILTER (WHERE disposition = 'train')"
_DECISION = (
    "LEFT JOIN (SELECT run, generated_in, shard, group_id, arg_max(disposition, iteration) AS disposition, "
    f"arg_max(reason, iteration) AS reason, {_TRAINED} AS trained_in FROM cairn_filter GROUP BY ALL) d "
    "ON d.run = b.run AND d.generated_in = b.iteration AND d.shard = b.shard AND d.group_id = b.group_id"
)


def _per_sample(name: str, alias: str, conditions: str) -> str:
    return (
        f"LEFT JOIN cairn_{name} {alias} ON {alias}.run = b.run AND {alias}.group_id = b.group_id "
        f"AND {alias}.sample_index = b.sample_index AND {conditions.format(alias)}"
    )


_TRAINED_WITH = "{0}.generated_in = b.iteration AND {0}.iteration = d.trained_in"
_OF_A_SAMPLE = {
    "g": _per_sample("reward", "g", "{0}.iteration = b.iteration AND {0}.shard = b.shard"),
    "d": _DECISION,
    "a": _per_sample("advantage_by_origin", "a", _TRAINED_WITH),
    "s": _per_sample("score_by_origin", "s", _TRAINED_WITH),
}
_GRADED = EquivalentJoin(
    "g", "cairn_reward b", frozenset({"run", "owner", "iteration", "shard", "group_id", "sample_index", "status"})
)
"""Join of a grade for each sample, whose status covers generation and grading. The tables match once all shards are
graded."""
_DECIDED = {
    "disposition": column(
        "VARCHAR", "d.disposition", "last decision on the group: `train`, `buffer`, `continue` or `drop`"
    ),
    "reason": column("VARCHAR", "d.reason", "why it was dropped"),
    "trained_in": column("BIGINT", "d.trained_in", "iteration that trained on it; NULL: none"),
}

GROUPS = View(
    "groups",
    "a group and the decision of an iteration's filter step; a buffered group has a row in each iteration",
    "cairn_filter b",
    {
        **OF_RUN,
        "iteration": column("BIGINT", "b.iteration", "iteration of the filter step"),
        "group_id": column("BIGINT", "b.group_id", "index of the prompt draw, unique in the run"),
        "generated_in": column("BIGINT", "b.generated_in", "iteration whose rollout holds its samples"),
        "shard": column("VARCHAR", "b.shard", "shard of that rollout"),
        "kept": column("BOOLEAN", "b.kept", "whether it passed the filter, or is trained on although it did not"),
        "disposition": column("VARCHAR", "b.disposition", "`train`, `buffer`, `continue` or `drop`"),
        "reason": column("VARCHAR", "b.reason", "why it was dropped"),
        "mean_reward": column("FLOAT", "b.mean_reward", ""),
        "std_reward": column("FLOAT", "b.std_reward", ""),
        "age": column("INTEGER", "b.age", "age of its newest tokens, in publications"),
        "max_age": column("INTEGER", "b.max_age", "highest age of tokens that are trained on; NULL: no limit"),
        "stale_tokens": column("INTEGER", "b.stale_tokens", "number of tokens older than `max_age`; NULL: none"),
        "stale_weights": column(
            "FLOAT[]",
            "b.stale_weights",
            "weights of tokens that are 1, 2, … publications older than `max_age`; NULL: 0",
        ),
        "priority": column("DOUBLE", "b.priority", "priority that the filter returned; NULL: none"),
        "key": column("VARCHAR", "b.key", "JSON value of its metadata under `rollout.buffer_key`"),
        "removed": column("INTEGER[]", "b.removed", "positions of its samples that are not trained on"),
        "prompt_index": column("BIGINT", "p.prompt_index", "row of the data set"),
        "epoch": column("INTEGER", "p.epoch", "pass through the data set"),
        "prompt": column("VARCHAR", "p.prompt", ""),
        "label": column("VARCHAR", "p.label", "expected answer"),
        "samples": column("BIGINT", "p.samples", "number of samples in the group"),
    },
    {
        "p": "LEFT JOIN (SELECT run, iteration, shard, group_id, any_value(prompt_index) AS prompt_index, "
        "any_value(epoch) AS epoch, any_value(prompt_text) AS prompt, any_value(label) AS label, "
        "count(*) AS samples FROM cairn_rollout GROUP BY ALL) p ON p.run = b.run AND p.iteration = b.generated_in "
        "AND p.shard = b.shard AND p.group_id = b.group_id"
    },
)
SAMPLES = View(
    "samples",
    "a sample as a shard's rollout generated it, with the results of later steps; a continued sample has a row in each "
    "shard",
    "cairn_rollout b",
    {
        **OF_SAMPLE,
        "rollout_id": column("BIGINT", "b.rollout_id", ""),
        "prompt_index": column("BIGINT", "b.prompt_index", "row of the data set"),
        "epoch": column("INTEGER", "b.epoch", "pass through the data set"),
        "prompt": column("VARCHAR", "b.prompt_text", ""),
        "response": column("VARCHAR", "b.response_text", ""),
        "label": column("VARCHAR", "b.label", "expected answer"),
        "metadata": column("VARCHAR", "b.metadata", "JSON object of the data row"),
        "prompt_tokens": column("BIGINT", "len(b.prompt_ids)", ""),
        "response_tokens": column("BIGINT", "len(b.response_ids)", ""),
        "masked_tokens": column("BIGINT", "len(list_filter(b.loss_mask, lambda m: m = 0))", "tokens with loss mask 0"),
        "prompt_ids": column("INTEGER[]", "b.prompt_ids", ""),
        "response_ids": column("INTEGER[]", "b.response_ids", ""),
        "trajectories": column(
            "INTEGER[]", "b.trajectories", "number of tokens of each trajectory; NULL: one trajectory"
        ),
        "trajectory_prompts": column(
            "INTEGER[][]",
            "b.trajectory_prompts",
            "own prompts of trajectories; NULL: all follow the row's prompt",
        ),
        "trajectory_rewards": column(
            "DOUBLE[]",
            "b.trajectory_rewards",
            "reward that user code set for each trajectory during generation; NULL: none",
        ),
        "trajectory_roles": column("VARCHAR[]", "b.trajectory_roles", "role of each trajectory; NULL: none"),
        "turn_rewards": column("DOUBLE[]", "b.turn_rewards", "reward that user code set for each segment; NULL: none"),
        "retold_tokens": column(
            "INTEGER",
            "b.retold_tokens",
            "sampled tokens that a later prompt, or the code's result, has as other tokens; NULL: none",
        ),
        "trajectory_infos": column(
            "VARCHAR[]",
            "b.trajectory_infos",
            "values for the grader that user code set, JSON of each trajectory; NULL: none",
        ),
        "images": column(
            "STRUCT(sha256 VARCHAR, height INTEGER, width INTEGER)[]",
            "b.images",
            "images of the prompt, in order, with their size in pixels for the model; NULL: none",
        ),
        "log_prob": column(
            "DOUBLE", "list_avg(b.log_probs)", "mean over the response's tokens, from the rollout engine"
        ),
        "weight_version": column(
            "INTEGER", "list_max(b.weight_versions)", "newest version that sampled one of its tokens"
        ),
        "finish_reason": column("VARCHAR", "b.finish_reason", "`stop`, `length` or `abort`"),
        "status": column(
            "VARCHAR",
            "coalesce(g.status, b.status)",
            "`completed`, `truncated`, `aborted` or `failed`, in generation or grading",
        ),
        "error": column("VARCHAR", "coalesce(g.error, b.error)", "error in generation or grading"),
        "seed": column("UBIGINT", "b.seed", "seed of the first call"),
        "engine": column("VARCHAR", "b.engine", "engine that generated it last"),
        "seconds": column("FLOAT", "b.seconds", "from acceptance of the sample to its end"),
        "cached_tokens": column("BIGINT", "b.cached_tokens", "prompt tokens that the engine had in its prefix cache"),
        "reward": column("FLOAT", "g.reward", "NULL: not graded, or failed"),
        "components": column("VARCHAR", "g.components", "JSON object of partial rewards"),
        "grader": column("VARCHAR", "g.grader", ""),
        "grader_version": column("VARCHAR", "g.grader_version", ""),
        **_DECIDED,
        "advantage": column(
            "DOUBLE", "list_avg(a.advantages)", "mean over the response's tokens; NULL: not computed yet"
        ),
        "age": column("INTEGER", "list_max(a.ages)", "age of its oldest token when it was trained on, in publications"),
    },
    _OF_A_SAMPLE,
    twin=_GRADED,
)
SEGMENTS = View(
    "segments",
    "a piece of a response: sampled by the policy in one call, or from the environment",
    "(SELECT *, unnest(pieces) AS piece, generate_subscripts(pieces, 1) - 1 AS segment FROM (SELECT *, "
    "coalesce(segments, [{'tokens': len(response_ids)::INTEGER, 'call': '', 'seed': seed, "
    "'finish_reason': finish_reason}]) AS pieces FROM cairn_rollout)) b",
    {
        **OF_SAMPLE,
        "segment": column("BIGINT", "b.segment", "position in the response, from 0"),
        "first_token": column(
            "BIGINT",
            "coalesce(list_sum(list_transform(b.pieces[:b.segment], lambda p: p.tokens)), 0)::BIGINT",
            "position of its first token in the response",
        ),
        "tokens": column("INTEGER", "b.piece.tokens", ""),
        "sampled": column(
            "BOOLEAN", "b.piece.call IS NOT NULL", "whether the policy sampled it; if not, it is from the environment"
        ),
        "call": column("VARCHAR", "nullif(b.piece.call, '')", "id of the call that sampled it"),
        "seed": column("UBIGINT", "b.piece.seed", "seed of that call"),
        "finish_reason": column("VARCHAR", "b.piece.finish_reason", "finish reason of that call"),
    },
)
_ONE_PIECE = "[{'tokens': len(response_ids)::INTEGER, 'call': '0', 'seed': seed, 'finish_reason': finish_reason}]"
_ANSWERS = (
    "(SELECT run, iteration, shard, group_id, sample_index, piece.call AS call, any_value(piece.tokens) AS tokens, "
    "any_value(piece.finish_reason) AS finish_reason FROM (SELECT run, iteration, shard, group_id, sample_index, "
    f"unnest(coalesce(segments, {_ONE_PIECE})) AS piece FROM cairn_rollout WHERE len(response_ids) > 0) "
    "WHERE piece.call IS NOT NULL GROUP BY ALL)"
)
"""Responses of the policy that make up a sample's response, each once."""
CALLS = View(
    "calls",
    "a call that a sample's code made: to the policy, a tool, a grader or the clock",
    "cairn_calls b",
    {
        **OF_SAMPLE,
        "order": column(
            "INTEGER", 'b."order"', "position of its response among the sample's, from 0; NULL: no response"
        ),
        "call": column("VARCHAR", "b.call", "its id in the sample, as in `segments`"),
        "kind": column("VARCHAR", "b.kind", "`sample` (the policy), `tool`, `judge` or `now`"),
        "name": column("VARCHAR", "b.name", "name of the tool or grader"),
        "turn": column("INTEGER", "b.turn", "number of policy responses before it"),
        "arguments": column("VARCHAR", "b.arguments", "JSON; NULL: a call to the policy or the clock"),
        "arguments_digest": column("VARCHAR", "b.arguments_digest", ""),
        "result": column(
            "VARCHAR",
            "coalesce(b.result, l.result)",
            "JSON; NULL: it failed, or it is a policy response: see `segments`",
        ),
        "result_digest": column("VARCHAR", "b.result_digest", "SHA-256 of a long result"),
        "error": column("VARCHAR", "b.error", "why it failed"),
        "failure": column(
            "VARCHAR",
            "b.reason",
            "why a tool failed: `arguments`, `raised`, `deadline`, `died`, `memory`, `type` or `size`",
        ),
        "given_tokens": column("INTEGER", "b.given_tokens", "tokens that the policy continued from"),
        "sampled_tokens": column("BIGINT", "coalesce(len(b.response_ids), p.tokens)", "tokens that the policy sampled"),
        "cached_tokens": column("BIGINT", "b.cached_tokens", "of `given_tokens`, those in the engine's prefix cache"),
        "finish_reason": column(
            "VARCHAR", "coalesce(b.finish_reason, p.finish_reason)", "finish reason of a policy response"
        ),
        "used": column(
            "BOOLEAN",
            "CASE WHEN b.kind = 'sample' THEN p.tokens IS NOT NULL END",
            "whether the policy response is part of the sample's response",
        ),
        "started_at": column("TIMESTAMP WITH TIME ZONE", time("started_at"), ""),
        "seconds": column("FLOAT", "b.seconds", "from start to response"),
    },
    {
        "l": "LEFT JOIN (SELECT DISTINCT run, iteration, shard, sha256, result FROM cairn_long_results) l ON "
        "l.run = b.run AND l.iteration = b.iteration AND l.shard = b.shard AND l.sha256 = b.result_digest",
        "p": f"LEFT JOIN {_ANSWERS} p ON p.run = b.run AND p.iteration = b.iteration AND p.shard = b.shard "
        "AND p.group_id = b.group_id AND p.sample_index = b.sample_index AND p.call = b.call",
    },
)
REWARDS = View(
    "rewards",
    "a grade",
    "cairn_reward b",
    {
        **OF_SAMPLE,
        "reward": column("FLOAT", "b.reward", "NULL: failed, or its group is not finished"),
        "components": column("VARCHAR", "b.components", "JSON object of partial rewards"),
        "raw_reward": column("FLOAT", "coalesce(b.raw_reward, b.reward)", "reward of the grader, before shaping"),
        "trajectory_rewards": column(
            "DOUBLE[]", "b.trajectory_rewards", "reward of each trajectory; NULL: all have the sample's reward"
        ),
        "grader": column("VARCHAR", "b.grader", ""),
        "grader_version": column("VARCHAR", "b.grader_version", ""),
        "status": column("VARCHAR", "b.status", "`completed`, `truncated`, `aborted` or `failed`"),
        "error": column("VARCHAR", "b.error", ""),
    },
)
ADVANTAGES = View(
    "advantages",
    "a sample of an iteration's batch, once its advantages are estimated",
    "cairn_advantage b",
    {
        **OF_RUN,
        "iteration": column("BIGINT", "b.iteration", "iteration that trains on it"),
        "group_id": column("BIGINT", "b.group_id", ""),
        "sample_index": column("INTEGER", "b.sample_index", "position in the group"),
        "reward": column("FLOAT", "b.reward", "reward that the update uses"),
        "advantage": column("DOUBLE", "list_avg(b.advantages)", "mean over the response's tokens"),
        "return": column("DOUBLE", "list_avg(b.returns)", "mean over the response's tokens"),
        "tokens": column("BIGINT", "len(b.advantages)", "number of tokens of the response"),
        "age": column("INTEGER", "list_max(b.ages)", "age of its oldest token, in publications; NULL: not known"),
    },
)
TOKENS = View(
    "tokens",
    "a token of a response",
    "(SELECT * FROM cairn_rollout WHERE response_ids IS NOT NULL) b",
    {
        **OF_SAMPLE,
        "position": column("BIGINT", "unnest(range(len(b.response_ids)))", "position in the response, from 0"),
        "token_id": column("INTEGER", "unnest(b.response_ids)", ""),
        "log_prob": column(
            "FLOAT", "unnest(b.log_probs)", "under the rollout engine; 0 for tokens from the environment"
        ),
        "loss_mask": column("UTINYINT", "unnest(b.loss_mask)", "1: trained on, unless too old"),
        "weight_version": column("INTEGER", "unnest(b.weight_versions)", "version that sampled it"),
        **_DECIDED,
        "advantage": column("FLOAT", "unnest(a.advantages)", "NULL: not computed yet"),
        "return": column("FLOAT", "unnest(a.returns)", ""),
        "age": column("INTEGER", "unnest(a.ages)", "age when it was trained on, in publications"),
        "old_log_prob": column("FLOAT", "unnest(s.log_probs)", "under the policy before the update; NULL: not scored"),
        "ref_log_prob": column("FLOAT", "unnest(s.ref_log_probs)", "under the reference model"),
        "teacher_log_prob": column("FLOAT", "unnest(s.teacher_log_probs)", "under the teacher"),
        "value": column("FLOAT", 'unnest(s."values")', "from the critic before the update"),
        "ratio": column(
            "DOUBLE",
            "unnest(list_transform(list_zip(s.log_probs, b.log_probs), lambda p: exp(p[1]::DOUBLE - p[2])))",
            "probability under the policy before the update, over that under the rollout engine; NULL: not scored",
        ),
    },
    {name: _OF_A_SAMPLE[name] for name in ("d", "a", "s")},
    anchor="token_id",
)
