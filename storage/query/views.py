"""The views of the ledger: columns, types and meanings. `docs/views.md` and `cairn sql --schema` show them."""

from cairn.storage.query.sample_views import (
    ADVANTAGES,
    CALLS,
    GROUPS,
    OF_RUN,
    REWARDS,
    SAMPLES,
    SEGMENTS,
    TOKENS,
    Column,
    View,
    time,
)

# Views of manifests and commits: `runs`, `steps`, `costs`.


RUNS = View(
    "runs",
    "a run",
    "cairn_runs b",
    {
        "run": Column("VARCHAR", "its name"),
        "id": Column("VARCHAR", "random id, unique to the run"),
        "parent": Column("VARCHAR", "the run that it was forked from"),
        "parent_iteration": Column("BIGINT", "the last iteration that the run shares with its parent"),
        "created_at": Column("TIMESTAMPTZ", "", time("created_at")),
        "code_version": Column("VARCHAR", "version of Cairn that created the run: JSON"),
        "last_iteration": Column("BIGINT", "the newest iteration with a commit"),
        "model": Column("VARCHAR", "", "b.config->>'$.model.path'"),
        "data": Column("VARCHAR", "", "b.config->>'$.data.path'"),
        "seed": Column("BIGINT", "", "(b.config->>'$.seed')::BIGINT"),
        "inputs": Column("VARCHAR", "JSON object of the digests of model, data and other inputs"),
        "config": Column("VARCHAR", "JSON object; read an option by `config->>'$.rollout.rollout_temperature'`"),
        "imported": Column(
            "VARCHAR", "JSON object: format and source of an imported run, which has no config; else NULL"
        ),
    },
)
STEPS = View(
    "steps",
    "a commit",
    "cairn_commits b",
    {
        **OF_RUN,
        "iteration": Column("BIGINT", ""),
        "step": Column("VARCHAR", "`rollout`, `reward`, `filter`, `score`, `advantage`, `train`, …"),
        "shard": Column("VARCHAR", "NULL: the step has no shards"),
        "name": Column("VARCHAR", "name of the commit in `inputs` of other commits"),
        "digest": Column("VARCHAR", "SHA-256 of the commit"),
        "attempt": Column("VARCHAR", "folder of the commit's files"),
        "epoch": Column("BIGINT", "number of the driver's lease"),
        "terms": Column("BIGINT", "number of the terms in force: see upgrades"),
        "started_at": Column("TIMESTAMPTZ", "", time("started_at")),
        "committed_at": Column("TIMESTAMPTZ", "", time("committed_at")),
        "seconds": Column("DOUBLE", "from start to commit", "b.committed_at - b.started_at"),
        "weight_version_in": Column("BIGINT", "weight version that it read, in optimizer steps"),
        "weight_version_out": Column("BIGINT", "weight version that it wrote, in optimizer steps"),
        "state_digest": Column("VARCHAR", "digest of the training state that it wrote"),
        "config_digest": Column("VARCHAR", "digest of the options that it read"),
        "inputs": Column("MAP(VARCHAR, VARCHAR)", "digest of each input, by name"),
        "values": Column("VARCHAR", "JSON object of small results that later steps read"),
        "metrics": Column("MAP(VARCHAR, DOUBLE)", "read one by `metrics['loss']`; see metrics.md"),
        "timings": Column("MAP(VARCHAR, DOUBLE)", "seconds, by activity"),
        "device": Column("VARCHAR", "processor or GPU that computed the step"),
        "threads": Column("BIGINT", ""),
        "host": Column("VARCHAR", ""),
        "versions": Column("MAP(VARCHAR, VARCHAR)", "versions of the packages in use"),
        "files": Column("BIGINT", "number of files of the snapshot"),
        "bytes": Column("BIGINT", "size of all files"),
        "rows": Column("BIGINT", "number of rows of all tables"),
    },
)
COSTS = View(
    "costs",
    "the cost of a step; see `steps` for the rest of its commit",
    "cairn_commits b",
    {
        **OF_RUN,
        "iteration": Column("BIGINT", ""),
        "step": Column("VARCHAR", ""),
        "shard": Column("VARCHAR", ""),
        "seconds": Column("DOUBLE", "from start to commit of the committed attempt", "b.committed_at - b.started_at"),
        "generating": Column(
            "DOUBLE", "of these, the seconds in which a rollout engine generated", "b.timings['generate']"
        ),
        "prompt_tokens": Column("DOUBLE", "prompt tokens sent to rollout engines", "b.metrics['prompt_tokens']"),
        "cached_tokens": Column("DOUBLE", "of these, the tokens found in a prefix cache", "b.metrics['cached_tokens']"),
        "response_tokens": Column("DOUBLE", "tokens generated", "b.metrics['response_tokens']"),
        "trained_tokens": Column(
            "DOUBLE", "tokens trained on, prompts included", "CASE WHEN b.step = 'train' THEN b.metrics['tokens'] END"
        ),
        "bytes": Column("BIGINT", "bytes written"),
        "device": Column("VARCHAR", ""),
        "threads": Column("BIGINT", "threads of the engine that computed the step"),
        "host": Column("VARCHAR", ""),
    },
)


# Views of evaluations: `evals` of runs, and `evaluations`, which the store holds by their weights.


EVALS = View(
    "evals",
    "a sample of a benchmark",
    "cairn_eval b",
    {
        **OF_RUN,
        "iteration": Column("BIGINT", "iteration after which it was evaluated; version 0 is in the first"),
        "weight_version": Column("BIGINT", ""),
        "benchmark": Column("VARCHAR", ""),
        "prompt_index": Column("BIGINT", "row of the benchmark"),
        "sample_index": Column("INTEGER", ""),
        "prompt": Column("VARCHAR", "", "b.prompt_text"),
        "response": Column("VARCHAR", "", "b.response_text"),
        "response_tokens": Column("BIGINT", "", "len(b.response_ids)"),
        "response_ids": Column("INTEGER[]", ""),
        "log_probs": Column("FLOAT[]", "log-probs of the response tokens; NULL: an earlier version stored none"),
        "reward": Column("FLOAT", "NULL: failed"),
        "label": Column("VARCHAR", "expected answer"),
        "finish_reason": Column("VARCHAR", ""),
        "status": Column("VARCHAR", ""),
        "error": Column("VARCHAR", ""),
        "seed": Column("UBIGINT", ""),
    },
)
EVALUATIONS = View(
    "evaluations",
    "a sample of a result that the store holds by its weights, from `cairn eval`, a schedule or another process",
    "cairn_evaluations b",
    {
        "result": Column("VARCHAR", "store path of the result's folder"),
        "run": Column("VARCHAR", "run whose weights were evaluated; NULL: the weights are a folder's"),
        "iteration": Column(
            "BIGINT", "iteration that made the weights; NULL: a folder's, or the run's initial weights"
        ),
        "weight_version": Column("BIGINT", ""),
        "model": Column("VARCHAR", "folder of the weights; NULL: the weights are a run's"),
        "weights": Column("VARCHAR", "digest of the weights"),
        "tokenizer": Column("VARCHAR", "digest of the tokenizer's content"),
        "engine": Column("VARCHAR", ""),
        "dtype": Column("VARCHAR", ""),
        "settings": Column("VARCHAR", "JSON object of everything else that the result depends on"),
        "score": Column("DOUBLE", "avg@n of the whole result"),
        "metrics": Column("VARCHAR", "JSON object of all figures of the result"),
        "committed_at": Column("TIMESTAMPTZ", "when the result was committed", "to_timestamp(b.committed_at)"),
        "benchmark": Column("VARCHAR", ""),
        "prompt_index": Column("BIGINT", "row of the benchmark"),
        "prompt_id": Column("VARCHAR", "identifier of the row"),
        "sample_index": Column("INTEGER", ""),
        "prompt": Column("VARCHAR", "", "b.prompt_text"),
        "response": Column("VARCHAR", "", "b.response_text"),
        "response_tokens": Column("BIGINT", "", "len(b.response_ids)"),
        "response_ids": Column("INTEGER[]", ""),
        "log_probs": Column("FLOAT[]", "log-probs of the response tokens"),
        "answer": Column("VARCHAR", "answer that the grader found in the response"),
        "reward": Column("DOUBLE", "NULL: failed"),
        "components": Column("VARCHAR", "JSON object of the grader's other results"),
        "label": Column("VARCHAR", "expected answer"),
        "grader": Column("VARCHAR", ""),
        "grader_version": Column("VARCHAR", ""),
        "finish_reason": Column("VARCHAR", ""),
        "status": Column("VARCHAR", "`completed`, `truncated` or `failed`"),
        "error": Column("VARCHAR", ""),
        "seed": Column("UBIGINT", ""),
        "seconds": Column("FLOAT", "from acceptance of the sample to its end"),
    },
)


__all__ = ["VIEWS", "Column", "View"]

VIEWS: dict[str, View] = {
    view.name: view
    for view in (RUNS, STEPS, GROUPS, SAMPLES, SEGMENTS, CALLS, REWARDS, ADVANTAGES, TOKENS, EVALS, EVALUATIONS, COSTS)
}
"""All views, by name."""
