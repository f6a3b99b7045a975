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
    sql: str = ""
    """Expression; empty for the column of that name in the base."""


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
        expressions = {name: self.columns[name].sql or f'b."{name}"' for name in chosen}
        items = ", ".join(f'{sql} AS "{name}"' for name, sql in expressions.items())
        joins: dict[str, str] = {}
        for alias, join in reversed(list(self.joins.items())):
            if re.search(rf"\b{alias}\.", " ".join([items, *joins.values()])):
                joins = {alias: join, **joins}
        if same_rows and self.twin is not None and self.twin.alias in joins:
            others = " ".join(join for alias, join in joins.items() if alias != self.twin.alias)
            if set(re.findall(r'\bb\."?(\w+)', items + others)) <= self.twin.columns:
                renamed = re.sub(rf"\b{self.twin.alias}\.", "b.", items)
                return f"SELECT {renamed} FROM {self.twin.base} {others}"
        return f"SELECT {items} FROM {self.base} {' '.join(joins.values())}"


OF_RUN = {
    "run": Column("VARCHAR", "the run; iterations that a fork shares appear under the fork and under its parent"),
    "owner": Column("VARCHAR", "the run that made it: `run = owner` counts each thing once"),
}
"""Columns of every view of data that runs made."""


def time(name: str) -> str:
    """Return the timestamp expression of a column of `b` that holds seconds since the epoch."""
    return f"to_timestamp(b.{name})"


OF_PLACE = {
    **OF_RUN,
    "iteration": Column("BIGINT", "iteration in which it was made"),
    "shard": Column("VARCHAR", "shard of the rollout that generated it"),
}
OF_SAMPLE = {
    **OF_PLACE,
    "group_id": Column("BIGINT", "index of the prompt draw, unique in the run"),
    "sample_index": Column("INTEGER", "position in the group"),
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
    "disposition": Column(
        "VARCHAR", "last decision on the group: `train`, `buffer`, `continue` or `drop`", "d.disposition"
    ),
    "reason": Column("VARCHAR", "why it was dropped", "d.reason"),
    "trained_in": Column("BIGINT", "iteration that trained on it; NULL: none", "d.trained_in"),
}

GROUPS = View(
    "groups",
    "a group and the decision of an iteration's filter step; a buffered group has a row in each iteration",
    "cairn_filter b",
    {
        **OF_RUN,
        "iteration": Column("BIGINT", "iteration of the filter step"),
        "group_id": Column("BIGINT", "index of the prompt draw, unique in the run"),
        "generated_in": Column("BIGINT", "iteration whose rollout holds its samples"),
        "shard": Column("VARCHAR", "shard of that rollout"),
        "kept": Column("BOOLEAN", "whether it passed the filter, or is trained on although it did not"),
        "disposition": Column("VARCHAR", "`train`, `buffer`, `continue` or `drop`"),
        "reason": Column("VARCHAR", "why it was dropped"),
        "mean_reward": Column("FLOAT", ""),
        "std_reward": Column("FLOAT", ""),
        "age": Column("INTEGER", "age of its newest tokens, in publications"),
        "max_age": Column("INTEGER", "highest age of tokens that are trained on; NULL: no limit"),
        "stale_tokens": Column("INTEGER", "number of tokens older than `max_age`; NULL: none"),
        "stale_weights": Column(
            "FLOAT[]", "weights of tokens that are 1, 2, … publications older than `max_age`; NULL: 0"
        ),
        "priority": Column("DOUBLE", "priority that the filter returned; NULL: none"),
        "key": Column("VARCHAR", "JSON value of its metadata under `rollout.buffer_key`"),
        "removed": Column("INTEGER[]", "positions of its samples that are not trained on"),
        "prompt_index": Column("BIGINT", "row of the data set", "p.prompt_index"),
        "epoch": Column("INTEGER", "pass through the data set", "p.epoch"),
        "prompt": Column("VARCHAR", "", "p.prompt"),
        "label": Column("VARCHAR", "expected answer", "p.label"),
        "samples": Column("BIGINT", "number of samples in the group", "p.samples"),
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
        "rollout_id": Column("BIGINT", ""),
        "prompt_index": Column("BIGINT", "row of the data set"),
        "epoch": Column("INTEGER", "pass through the data set"),
        "prompt": Column("VARCHAR", "", "b.prompt_text"),
        "response": Column("VARCHAR", "", "b.response_text"),
        "label": Column("VARCHAR", "expected answer"),
        "metadata": Column("VARCHAR", "JSON object of the data row"),
        "prompt_tokens": Column("BIGINT", "", "len(b.prompt_ids)"),
        "response_tokens": Column("BIGINT", "", "len(b.response_ids)"),
        "masked_tokens": Column("BIGINT", "tokens with loss mask 0", "len(list_filter(b.loss_mask, lambda m: m = 0))"),
        "prompt_ids": Column("INTEGER[]", ""),
        "response_ids": Column("INTEGER[]", ""),
        "trajectories": Column("INTEGER[]", "number of tokens of each trajectory; NULL: one trajectory"),
        "trajectory_prompts": Column("INTEGER[][]", "own prompts of trajectories; NULL: all follow the row's prompt"),
        "trajectory_rewards": Column(
            "DOUBLE[]", "reward that user code set for each trajectory during generation; NULL: none"
        ),
        "trajectory_roles": Column("VARCHAR[]", "role of each trajectory; NULL: none"),
        "turn_rewards": Column("DOUBLE[]", "reward that user code set for each segment; NULL: none"),
        "retold_tokens": Column(
            "INTEGER", "sampled tokens that a later prompt, or the code's result, has as other tokens; NULL: none"
        ),
        "trajectory_infos": Column(
            "VARCHAR[]", "values for the grader that user code set, JSON of each trajectory; NULL: none"
        ),
        "images": Column(
            "STRUCT(sha256 VARCHAR, height INTEGER, width INTEGER)[]",
            "images of the prompt, in order, with their size in pixels for the model; NULL: none",
        ),
        "log_prob": Column(
            "DOUBLE", "mean over the response's tokens, from the rollout engine", "list_avg(b.log_probs)"
        ),
        "weight_version": Column(
            "INTEGER", "newest version that sampled one of its tokens", "list_max(b.weight_versions)"
        ),
        "finish_reason": Column("VARCHAR", "`stop`, `length` or `abort`"),
        "status": Column(
            "VARCHAR",
            "`completed`, `truncated`, `aborted` or `failed`, in generation or grading",
            "coalesce(g.status, b.status)",
        ),
        "error": Column("VARCHAR", "error in generation or grading", "coalesce(g.error, b.error)"),
        "seed": Column("UBIGINT", "seed of the first call"),
        "engine": Column("VARCHAR", "engine that generated it last"),
        "seconds": Column("FLOAT", "from acceptance of the sample to its end"),
        "cached_tokens": Column("BIGINT", "prompt tokens that the engine had in its prefix cache"),
        "reward": Column("FLOAT", "NULL: not graded, or failed", "g.reward"),
        "components": Column("VARCHAR", "JSON object of partial rewards", "g.components"),
        "grader": Column("VARCHAR", "", "g.grader"),
        "grader_version": Column("VARCHAR", "", "g.grader_version"),
        **_DECIDED,
        "advantage": Column(
            "DOUBLE", "mean over the response's tokens; NULL: not computed yet", "list_avg(a.advantages)"
        ),
        "age": Column("INTEGER", "age of its oldest token when it was trained on, in publications", "list_max(a.ages)"),
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
        "segment": Column("BIGINT", "position in the response, from 0"),
        "first_token": Column(
            "BIGINT",
            "position of its first token in the response",
            "coalesce(list_sum(list_transform(b.pieces[:b.segment], lambda p: p.tokens)), 0)::BIGINT",
        ),
        "tokens": Column("INTEGER", "", "b.piece.tokens"),
        "sampled": Column(
            "BOOLEAN", "whether the policy sampled it; if not, it is from the environment", "b.piece.call IS NOT NULL"
        ),
        "call": Column("VARCHAR", "id of the call that sampled it", "nullif(b.piece.call, '')"),
        "seed": Column("UBIGINT", "seed of that call", "b.piece.seed"),
        "finish_reason": Column("VARCHAR", "finish reason of that call", "b.piece.finish_reason"),
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
        "order": Column("INTEGER", "position of its response among the sample's, from 0; NULL: no response"),
        "call": Column("VARCHAR", "its id in the sample, as in `segments`"),
        "kind": Column("VARCHAR", "`sample` (the policy), `tool`, `judge` or `now`"),
        "name": Column("VARCHAR", "name of the tool or grader"),
        "turn": Column("INTEGER", "number of policy responses before it"),
        "arguments": Column("VARCHAR", "JSON; NULL: a call to the policy or the clock"),
        "arguments_digest": Column("VARCHAR", ""),
        "result": Column(
            "VARCHAR",
            "JSON; NULL: it failed, or it is a policy response: see `segments`",
            "coalesce(b.result, l.result)",
        ),
        "result_digest": Column("VARCHAR", "SHA-256 of a long result"),
        "error": Column("VARCHAR", "why it failed"),
        "failure": Column(
            "VARCHAR",
            "why a tool failed: `arguments`, `raised`, `deadline`, `died`, `memory`, `type` or `size`",
            "b.reason",
        ),
        "given_tokens": Column("INTEGER", "tokens that the policy continued from"),
        "sampled_tokens": Column("BIGINT", "tokens that the policy sampled", "coalesce(len(b.response_ids), p.tokens)"),
        "cached_tokens": Column("BIGINT", "of `given_tokens`, those in the engine's prefix cache"),
        "finish_reason": Column(
            "VARCHAR", "finish reason of a policy response", "coalesce(b.finish_reason, p.finish_reason)"
        ),
        "used": Column(
            "BOOLEAN",
            "whether the policy response is part of the sample's response",
            "CASE WHEN b.kind = 'sample' THEN p.tokens IS NOT NULL END",
        ),
        "started_at": Column("TIMESTAMP WITH TIME ZONE", "", time("started_at")),
        "seconds": Column("FLOAT", "from start to response"),
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
        "reward": Column("FLOAT", "NULL: failed, or its group is not finished"),
        "components": Column("VARCHAR", "JSON object of partial rewards"),
        "raw_reward": Column("FLOAT", "reward of the grader, before shaping", "coalesce(b.raw_reward, b.reward)"),
        "trajectory_rewards": Column("DOUBLE[]", "reward of each trajectory; NULL: all have the sample's reward"),
        "grader": Column("VARCHAR", ""),
        "grader_version": Column("VARCHAR", ""),
        "status": Column("VARCHAR", "`completed`, `truncated`, `aborted` or `failed`"),
        "error": Column("VARCHAR", ""),
    },
)
ADVANTAGES = View(
    "advantages",
    "a sample of an iteration's batch, once its advantages are estimated",
    "cairn_advantage b",
    {
        **OF_RUN,
        "iteration": Column("BIGINT", "iteration that trains on it"),
        "group_id": Column("BIGINT", ""),
        "sample_index": Column("INTEGER", "position in the group"),
        "reward": Column("FLOAT", "reward that the update uses"),
        "advantage": Column("DOUBLE", "mean over the response's tokens", "list_avg(b.advantages)"),
        "return": Column("DOUBLE", "mean over the response's tokens", "list_avg(b.returns)"),
        "tokens": Column("BIGINT", "number of tokens of the response", "len(b.advantages)"),
        "age": Column("INTEGER", "age of its oldest token, in publications; NULL: not known", "list_max(b.ages)"),
    },
)
TOKENS = View(
    "tokens",
    "a token of a response",
    "(SELECT * FROM cairn_rollout WHERE response_ids IS NOT NULL) b",
    {
        **OF_SAMPLE,
        "position": Column("BIGINT", "position in the response, from 0", "unnest(range(len(b.response_ids)))"),
        "token_id": Column("INTEGER", "", "unnest(b.response_ids)"),
        "log_prob": Column(
            "FLOAT", "under the rollout engine; 0 for tokens from the environment", "unnest(b.log_probs)"
        ),
        "loss_mask": Column("UTINYINT", "1: trained on, unless too old", "unnest(b.loss_mask)"),
        "weight_version": Column("INTEGER", "version that sampled it", "unnest(b.weight_versions)"),
        **_DECIDED,
        "advantage": Column("FLOAT", "NULL: not computed yet", "unnest(a.advantages)"),
        "return": Column("FLOAT", "", "unnest(a.returns)"),
        "age": Column("INTEGER", "age when it was trained on, in publications", "unnest(a.ages)"),
        "old_log_prob": Column("FLOAT", "under the policy before the update; NULL: not scored", "unnest(s.log_probs)"),
        "ref_log_prob": Column("FLOAT", "under the reference model", "unnest(s.ref_log_probs)"),
        "teacher_log_prob": Column("FLOAT", "under the teacher", "unnest(s.teacher_log_probs)"),
        "value": Column("FLOAT", "from the critic before the update", 'unnest(s."values")'),
        "ratio": Column(
            "DOUBLE",
            "probability under the policy before the update, over that under the rollout engine; NULL: not scored",
            "unnest(list_transform(list_zip(s.log_probs, b.log_probs), lambda p: exp(p[1]::DOUBLE - p[2])))",
        ),
    },
    {name: _OF_A_SAMPLE[name] for name in ("d", "a", "s")},
    anchor="token_id",
)
