"""The views of the ledger: their columns, types and meanings. `docs/sql.md` and `cairn sql --schema` are this file.

A view is a SELECT over the tables of one step, `base`, and joins. A column's expression names the joins that it needs
by their alias: a query's view is made of the columns that it names and of their joins alone.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Column:
    """A column of a view."""

    type: str
    """Of DuckDB."""
    about: str
    sql: str


@dataclass(frozen=True)
class Twin:
    """A join that mostly has a row for each row of the base, and then can stand for it."""

    alias: str
    base: str
    columns: frozenset[str]
    """Of the base that the join has as well, with the same values."""


@dataclass(frozen=True)
class View:
    """A view of the ledger."""

    name: str
    about: str
    """What a row is."""
    base: str
    columns: Mapping[str, Column]
    joins: Mapping[str, str] = field(default_factory=dict)
    """By alias, in an order in which each needs those before it only."""
    anchor: str = ""
    """A column that makes the rows, and is always selected: the one that unnests."""
    twin: Twin | None = None

    def select(self, names: Collection[str], *, same_rows: bool = False) -> str:
        """The SELECT of some columns, in the view's order; one that is asked for none has its first. `same_rows`: the
        base and its twin have a row for each row of the other."""
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


def _c(type_: str, sql: str, about: str) -> Column:
    return Column(type_, about, sql)


_RUN = {
    "run": _c("VARCHAR", "b.run", "the run; iterations that a fork shares stand under the fork and under its parent"),
    "owner": _c("VARCHAR", "b.owner", "the run that made it: `run = owner` counts each thing once"),
}
_PLACE = {
    **_RUN,
    "iteration": _c("BIGINT", "b.iteration", "in which it was made"),
    "shard": _c("VARCHAR", "b.shard", "of the rollout that generated it"),
}
_SAMPLE = {
    **_PLACE,
    "group_id": _c("BIGINT", "b.group_id", "index of the prompt draw, unique in the run"),
    "sample_index": _c("INTEGER", "b.sample_index", "position in the group"),
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
_GRADED = Twin(
    "g", "cairn_reward b", frozenset({"run", "owner", "iteration", "shard", "group_id", "sample_index", "status"})
)
"""A grade for each sample, in which the status is that of both; so it is once all shards are graded."""
_DECIDED = {
    "disposition": _c(
        "VARCHAR", "d.disposition", "what became of the group at last: `train`, `buffer`, `continue` or `drop`"
    ),
    "reason": _c("VARCHAR", "d.reason", "why it was dropped"),
    "trained_in": _c("BIGINT", "d.trained_in", "the iteration that trained on it; NULL: none did"),
}


def _time(name: str) -> str:
    return f"to_timestamp(b.{name})"


RUNS = View(
    "runs",
    "a run",
    "cairn_runs b",
    {
        "run": _c("VARCHAR", "b.run", "its name"),
        "id": _c("VARCHAR", "b.id", "random, unlike that of every other run"),
        "parent": _c("VARCHAR", "b.parent", "the run that it was forked from"),
        "parent_iteration": _c("BIGINT", "b.parent_iteration", "the last iteration that the two share"),
        "created_at": _c("TIMESTAMPTZ", _time("created_at"), ""),
        "code_version": _c("VARCHAR", "b.code_version", "of Cairn, that created it: JSON"),
        "last_iteration": _c("BIGINT", "b.last_iteration", "the newest with a commit"),
        "model": _c("VARCHAR", "b.config->>'$.model.path'", ""),
        "data": _c("VARCHAR", "b.config->>'$.data.path'", ""),
        "seed": _c("BIGINT", "(b.config->>'$.seed')::BIGINT", ""),
        "inputs": _c("VARCHAR", "b.inputs", "JSON object of the digests of model, data and the like"),
        "config": _c("VARCHAR", "b.config", "JSON object; take options by `config->>'$.rollout.rollout_temperature'`"),
    },
)
STEPS = View(
    "steps",
    "a commit",
    "cairn_commits b",
    {
        **_RUN,
        "iteration": _c("BIGINT", "b.iteration", ""),
        "step": _c("VARCHAR", "b.step", "`rollout`, `reward`, `filter`, `score`, `advantage`, `train`, …"),
        "shard": _c("VARCHAR", "b.shard", "NULL where the step has none"),
        "name": _c("VARCHAR", "b.name", "as `inputs` of other commits names it"),
        "digest": _c("VARCHAR", "b.digest", "SHA-256 of the commit"),
        "attempt": _c("VARCHAR", "b.attempt", "the folder of its files"),
        "epoch": _c("BIGINT", "b.epoch", "the driver's lease"),
        "terms": _c("BIGINT", "b.terms", "number of the terms that it was made under: see upgrades"),
        "started_at": _c("TIMESTAMPTZ", _time("started_at"), ""),
        "committed_at": _c("TIMESTAMPTZ", _time("committed_at"), ""),
        "seconds": _c("DOUBLE", "b.committed_at - b.started_at", "from its start to its commit"),
        "weight_version_in": _c("BIGINT", "b.weight_version_in", "optimizer steps behind the weights that it read"),
        "weight_version_out": _c("BIGINT", "b.weight_version_out", "and behind those that it left"),
        "state_digest": _c("VARCHAR", "b.state_digest", "of the training state that it left"),
        "config_digest": _c("VARCHAR", "b.config_digest", "of the options that it read"),
        "inputs": _c("MAP(VARCHAR, VARCHAR)", "b.inputs", "digest of everything that it read, by name"),
        "values": _c("VARCHAR", 'b."values"', "JSON object of small results that later steps read"),
        "metrics": _c("MAP(VARCHAR, DOUBLE)", "b.metrics", "take one by `metrics['loss']`; see metrics.md"),
        "timings": _c("MAP(VARCHAR, DOUBLE)", "b.timings", "seconds, by what they went into"),
        "device": _c("VARCHAR", "b.device", "processor or GPU that computed"),
        "threads": _c("BIGINT", "b.threads", ""),
        "host": _c("VARCHAR", "b.host", ""),
        "versions": _c("MAP(VARCHAR, VARCHAR)", "b.versions", "of the packages that computed"),
        "files": _c("BIGINT", "b.files", "of its snapshot"),
        "bytes": _c("BIGINT", "b.bytes", "of all its files"),
        "rows": _c("BIGINT", 'b."rows"', "of all its tables"),
    },
)
GROUPS = View(
    "groups",
    "a group as the filter step of an iteration judged it; one that waited in the buffer has a row in each iteration",
    "cairn_filter b",
    {
        **_RUN,
        "iteration": _c("BIGINT", "b.iteration", "that judged it"),
        "group_id": _c("BIGINT", "b.group_id", "index of the prompt draw, unique in the run"),
        "generated_in": _c("BIGINT", "b.generated_in", "the iteration whose rollout holds its samples"),
        "shard": _c("VARCHAR", "b.shard", "of that rollout"),
        "kept": _c("BOOLEAN", "b.kept", "passed the filter, or trained on all the same"),
        "disposition": _c("VARCHAR", "b.disposition", "`train`, `buffer`, `continue` or `drop`"),
        "reason": _c("VARCHAR", "b.reason", "why it was dropped"),
        "mean_reward": _c("FLOAT", "b.mean_reward", ""),
        "std_reward": _c("FLOAT", "b.std_reward", ""),
        "age": _c("INTEGER", "b.age", "of its newest tokens, in publications"),
        "max_age": _c("INTEGER", "b.max_age", "of the tokens that are trained on; NULL: of any age"),
        "prompt_index": _c("BIGINT", "p.prompt_index", "row of the data set"),
        "epoch": _c("INTEGER", "p.epoch", "pass through the data set"),
        "prompt": _c("VARCHAR", "p.prompt", ""),
        "label": _c("VARCHAR", "p.label", "expected answer"),
        "samples": _c("BIGINT", "p.samples", "of the group"),
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
    "a sample as a shard's rollout left it, with what later steps made of it; one that was continued has a row in each "
    "shard",
    "cairn_rollout b",
    {
        **_SAMPLE,
        "rollout_id": _c("BIGINT", "b.rollout_id", ""),
        "prompt_index": _c("BIGINT", "b.prompt_index", "row of the data set"),
        "epoch": _c("INTEGER", "b.epoch", "pass through the data set"),
        "prompt": _c("VARCHAR", "b.prompt_text", ""),
        "response": _c("VARCHAR", "b.response_text", ""),
        "label": _c("VARCHAR", "b.label", "expected answer"),
        "metadata": _c("VARCHAR", "b.metadata", "JSON object of the data row"),
        "prompt_tokens": _c("BIGINT", "len(b.prompt_ids)", ""),
        "response_tokens": _c("BIGINT", "len(b.response_ids)", ""),
        "masked_tokens": _c("BIGINT", "len(list_filter(b.loss_mask, lambda m: m = 0))", "given by the world"),
        "prompt_ids": _c("INTEGER[]", "b.prompt_ids", ""),
        "response_ids": _c("INTEGER[]", "b.response_ids", ""),
        "trajectories": _c("INTEGER[]", "b.trajectories", "tokens of each trajectory; NULL: it has one"),
        "log_prob": _c("DOUBLE", "list_avg(b.log_probs)", "mean over the response's tokens, of the rollout engine"),
        "weight_version": _c("INTEGER", "list_max(b.weight_versions)", "the newest that sampled a token of it"),
        "finish_reason": _c("VARCHAR", "b.finish_reason", "`stop`, `length` or `abort`"),
        "status": _c(
            "VARCHAR",
            "coalesce(g.status, b.status)",
            "`completed`, `truncated`, `aborted` or `failed`, by its grader too",
        ),
        "error": _c("VARCHAR", "coalesce(g.error, b.error)", "of its generation or grading"),
        "seed": _c("UBIGINT", "b.seed", "of the first call"),
        "engine": _c("VARCHAR", "b.engine", "that generated it last"),
        "seconds": _c("FLOAT", "b.seconds", "from its admission to its end"),
        "cached_tokens": _c("BIGINT", "b.cached_tokens", "that the engine had in its prefix cache"),
        "reward": _c("FLOAT", "g.reward", "NULL: not graded, or failed"),
        "components": _c("VARCHAR", "g.components", "JSON object of partial rewards"),
        "grader": _c("VARCHAR", "g.grader", ""),
        "grader_version": _c("VARCHAR", "g.grader_version", ""),
        **_DECIDED,
        "advantage": _c("DOUBLE", "list_avg(a.advantages)", "mean over the response's tokens; NULL: not trained on"),
        "age": _c("INTEGER", "list_max(a.ages)", "of its oldest token when it was trained on, in publications"),
    },
    _OF_A_SAMPLE,
    twin=_GRADED,
)
SEGMENTS = View(
    "segments",
    "a piece of a response, which the policy sampled in one call or the world gave",
    "(SELECT *, unnest(pieces) AS piece, generate_subscripts(pieces, 1) - 1 AS segment FROM (SELECT *, "
    "coalesce(segments, [{'tokens': len(response_ids)::INTEGER, 'call': '', 'seed': seed, "
    "'finish_reason': finish_reason}]) AS pieces FROM cairn_rollout)) b",
    {
        **_SAMPLE,
        "segment": _c("BIGINT", "b.segment", "position in the response, from 0"),
        "first_token": _c(
            "BIGINT",
            "coalesce(list_sum(list_transform(b.pieces[:b.segment], lambda p: p.tokens)), 0)::BIGINT",
            "position of its first token in the response",
        ),
        "tokens": _c("INTEGER", "b.piece.tokens", ""),
        "sampled": _c("BOOLEAN", "b.piece.call IS NOT NULL", "by the policy; else the world gave it"),
        "call": _c("VARCHAR", "nullif(b.piece.call, '')", "id of the call that sampled it"),
        "seed": _c("UBIGINT", "b.piece.seed", "of that call"),
        "finish_reason": _c("VARCHAR", "b.piece.finish_reason", "of that call"),
    },
)
REWARDS = View(
    "rewards",
    "a grade",
    "cairn_reward b",
    {
        **_SAMPLE,
        "reward": _c("FLOAT", "b.reward", "NULL: failed, or of a group that is not finished"),
        "components": _c("VARCHAR", "b.components", "JSON object of partial rewards"),
        "grader": _c("VARCHAR", "b.grader", ""),
        "grader_version": _c("VARCHAR", "b.grader_version", ""),
        "status": _c("VARCHAR", "b.status", "`completed`, `truncated`, `aborted` or `failed`"),
        "error": _c("VARCHAR", "b.error", ""),
    },
)
ADVANTAGES = View(
    "advantages",
    "a sample of the batch that an iteration trained on",
    "cairn_advantage b",
    {
        **_RUN,
        "iteration": _c("BIGINT", "b.iteration", "that trained on it"),
        "group_id": _c("BIGINT", "b.group_id", ""),
        "sample_index": _c("INTEGER", "b.sample_index", "position in the group"),
        "reward": _c("FLOAT", "b.reward", "as the update used it"),
        "advantage": _c("DOUBLE", "list_avg(b.advantages)", "mean over the response's tokens"),
        "return": _c("DOUBLE", "list_avg(b.returns)", "mean over the response's tokens"),
        "tokens": _c("BIGINT", "len(b.advantages)", "of the response"),
        "age": _c("INTEGER", "list_max(b.ages)", "of its oldest token, in publications; NULL: not known"),
    },
)
TOKENS = View(
    "tokens",
    "a token of a response",
    "cairn_rollout b",
    {
        **_SAMPLE,
        "position": _c("BIGINT", "unnest(range(len(b.response_ids)))", "in the response, from 0"),
        "token_id": _c("INTEGER", "unnest(b.response_ids)", ""),
        "log_prob": _c("FLOAT", "unnest(b.log_probs)", "under the rollout engine; 0 where the world gave it"),
        "loss_mask": _c("UTINYINT", "unnest(b.loss_mask)", "1: trained on, unless it was too old"),
        "weight_version": _c("INTEGER", "unnest(b.weight_versions)", "that sampled it"),
        **_DECIDED,
        "advantage": _c("FLOAT", "unnest(a.advantages)", "NULL: not trained on"),
        "return": _c("FLOAT", "unnest(a.returns)", ""),
        "age": _c("INTEGER", "unnest(a.ages)", "when it was trained on, in publications"),
        "old_log_prob": _c("FLOAT", "unnest(s.log_probs)", "under the policy before the update; NULL: not scored"),
        "ref_log_prob": _c("FLOAT", "unnest(s.ref_log_probs)", "under the reference model"),
        "teacher_log_prob": _c("FLOAT", "unnest(s.teacher_log_probs)", "under the teacher"),
        "value": _c("FLOAT", 'unnest(s."values")', "of the critic before the update"),
        "ratio": _c(
            "DOUBLE",
            "unnest(list_transform(list_zip(s.log_probs, b.log_probs), lambda p: exp(p[1]::DOUBLE - p[2])))",
            "probability under the policy before the update over that under the rollout engine; NULL: not scored",
        ),
    },
    {name: _OF_A_SAMPLE[name] for name in ("d", "a", "s")},
    anchor="token_id",
)
EVALS = View(
    "evals",
    "a sample of a benchmark",
    "cairn_eval b",
    {
        **_RUN,
        "iteration": _c("BIGINT", "b.iteration", "after which it was evaluated; version 0 stands in the first"),
        "weight_version": _c("BIGINT", "b.weight_version", ""),
        "benchmark": _c("VARCHAR", "b.benchmark", ""),
        "prompt_index": _c("BIGINT", "b.prompt_index", "row of the benchmark"),
        "sample_index": _c("INTEGER", "b.sample_index", ""),
        "prompt": _c("VARCHAR", "b.prompt_text", ""),
        "response": _c("VARCHAR", "b.response_text", ""),
        "response_tokens": _c("BIGINT", "len(b.response_ids)", ""),
        "response_ids": _c("INTEGER[]", "b.response_ids", ""),
        "log_probs": _c("FLOAT[]", "b.log_probs", "of the response tokens; NULL: an earlier version kept none"),
        "reward": _c("FLOAT", "b.reward", "NULL: failed"),
        "label": _c("VARCHAR", "b.label", "expected answer"),
        "finish_reason": _c("VARCHAR", "b.finish_reason", ""),
        "status": _c("VARCHAR", "b.status", ""),
        "error": _c("VARCHAR", "b.error", ""),
        "seed": _c("UBIGINT", "b.seed", ""),
    },
)
EVALUATIONS = View(
    "evaluations",
    "a sample of a result that the store keeps by its weights, from `cairn eval`, a schedule or anyone",
    "cairn_evaluations b",
    {
        "result": _c("VARCHAR", "b.result", "store path of the result's folder"),
        "run": _c("VARCHAR", "b.run", "whose weights they were when they were evaluated; NULL: a folder's"),
        "iteration": _c("BIGINT", "b.iteration", "that left them; NULL: a folder's, or those that the run began with"),
        "weight_version": _c("BIGINT", "b.weight_version", ""),
        "model": _c("VARCHAR", "b.model", "the folder; NULL: a run's"),
        "weights": _c("VARCHAR", "b.weights", "digest of the weights"),
        "tokenizer": _c("VARCHAR", "b.tokenizer", "digest of what the tokenizer means"),
        "engine": _c("VARCHAR", "b.engine", ""),
        "dtype": _c("VARCHAR", "b.dtype", ""),
        "settings": _c("VARCHAR", "b.settings", "JSON object of all else that the result depends on"),
        "score": _c("DOUBLE", "b.score", "avg@n of the whole result"),
        "metrics": _c("VARCHAR", "b.metrics", "JSON object of all figures of the result"),
        "committed_at": _c("TIMESTAMPTZ", "to_timestamp(b.committed_at)", "of the result"),
        "benchmark": _c("VARCHAR", "b.benchmark", ""),
        "prompt_index": _c("BIGINT", "b.prompt_index", "row of the benchmark"),
        "prompt_id": _c("VARCHAR", "b.prompt_id", "what names the row"),
        "sample_index": _c("INTEGER", "b.sample_index", ""),
        "prompt": _c("VARCHAR", "b.prompt_text", ""),
        "response": _c("VARCHAR", "b.response_text", ""),
        "response_tokens": _c("BIGINT", "len(b.response_ids)", ""),
        "response_ids": _c("INTEGER[]", "b.response_ids", ""),
        "log_probs": _c("FLOAT[]", "b.log_probs", "of the response tokens"),
        "answer": _c("VARCHAR", "b.answer", "what the grader took for the answer"),
        "reward": _c("DOUBLE", "b.reward", "NULL: failed"),
        "components": _c("VARCHAR", "b.components", "JSON object of what else the grader said"),
        "label": _c("VARCHAR", "b.label", "expected answer"),
        "grader": _c("VARCHAR", "b.grader", ""),
        "grader_version": _c("VARCHAR", "b.grader_version", ""),
        "finish_reason": _c("VARCHAR", "b.finish_reason", ""),
        "status": _c("VARCHAR", "b.status", "`completed`, `truncated` or `failed`"),
        "error": _c("VARCHAR", "b.error", ""),
        "seed": _c("UBIGINT", "b.seed", ""),
        "seconds": _c("FLOAT", "b.seconds", "from the sample's admission to its end"),
    },
)
COSTS = View(
    "costs",
    "what a step took; see `steps` for the rest of its commit",
    "cairn_commits b",
    {
        **_RUN,
        "iteration": _c("BIGINT", "b.iteration", ""),
        "step": _c("VARCHAR", "b.step", ""),
        "shard": _c("VARCHAR", "b.shard", ""),
        "seconds": _c("DOUBLE", "b.committed_at - b.started_at", "of the committed attempt, from start to commit"),
        "generating": _c("DOUBLE", "b.timings['generate']", "seconds of these in which a rollout engine generated"),
        "prompt_tokens": _c("DOUBLE", "b.metrics['prompt_tokens']", "given to rollout engines"),
        "cached_tokens": _c("DOUBLE", "b.metrics['cached_tokens']", "of these in a prefix cache"),
        "response_tokens": _c("DOUBLE", "b.metrics['response_tokens']", "generated"),
        "trained_tokens": _c("DOUBLE", "CASE WHEN b.step = 'train' THEN b.metrics['tokens'] END", "in the loss"),
        "bytes": _c("BIGINT", "b.bytes", "written"),
        "device": _c("VARCHAR", "b.device", ""),
        "threads": _c("BIGINT", "b.threads", "of the engine that computed"),
        "host": _c("VARCHAR", "b.host", ""),
    },
)
VIEWS: dict[str, View] = {
    view.name: view
    for view in (RUNS, STEPS, GROUPS, SAMPLES, SEGMENTS, REWARDS, ADVANTAGES, TOKENS, EVALS, EVALUATIONS, COSTS)
}
"""All views, by name."""
