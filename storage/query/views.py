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
    column,
    time,
)

# Views of manifests and commits: `runs`, `steps`, `costs`.


RUNS = View(
    "runs",
    "a run",
    "cairn_runs b",
    {
        "run": column("VARCHAR", "b.run", "its name"),
        "id": column("VARCHAR", "b.id", "random id, unique to the run"),
        "parent": column("VARCHAR", "b.parent", "the run that it was forked from"),
        "parent_iteration": column(
            "BIGINT", "b.parent_iteration", "the last iteration that the run shares with its parent"
        ),
        "created_at": column("TIMESTAMPTZ", time("created_at"), ""),
        "code_version": column("VARCHAR", "b.code_version", "version of Cairn that created the run: JSON"),
        "last_iteration": column("BIGINT", "b.last_iteration", "the newest iteration with a commit"),
        "model": column("VARCHAR", "b.config->>'$.model.path'", ""),
        "data": column("VARCHAR", "b.config->>'$.data.path'", ""),
        "seed": column("BIGINT", "(b.config->>'$.seed')::BIGINT", ""),
        "inputs": column("VARCHAR", "b.inputs", "JSON object of the digests of model, data and other inputs"),
        "config": column(
            "VARCHAR", "b.config", "JSON object; read an option by `config->>'$.rollout.rollout_temperature'`"
        ),
        "imported": column(
            "VARCHAR", "b.imported", "JSON object: format and source of an imported run, which has no config; else NULL"
        ),
    },
)
STEPS = View(
    "steps",
    "a commit",
    "cairn_commits b",
    {
        **OF_RUN,
        "iteration": column("BIGINT", "b.iteration", ""),
        "step": column("VARCHAR", "b.step", "`rollout`, `reward`, `filter`, `score`, `advantage`, `train`, …"),
        "shard": column("VARCHAR", "b.shard", "NULL: the step has no shards"),
        "name": column("VARCHAR", "b.name", "name of the commit in `inputs` of other commits"),
        "digest": column("VARCHAR", "b.digest", "SHA-256 of the commit"),
        "attempt": column("VARCHAR", "b.attempt", "folder of the commit's files"),
        "epoch": column("BIGINT", "b.epoch", "number of the driver's lease"),
        "terms": column("BIGINT", "b.terms", "number of the terms in force: see upgrades"),
        "started_at": column("TIMESTAMPTZ", time("started_at"), ""),
        "committed_at": column("TIMESTAMPTZ", time("committed_at"), ""),
        "seconds": column("DOUBLE", "b.committed_at - b.started_at", "from start to commit"),
        "weight_version_in": column("BIGINT", "b.weight_version_in", "weight version that it read, in optimizer steps"),
        "weight_version_out": column(
            "BIGINT", "b.weight_version_out", "weight version that it wrote, in optimizer steps"
        ),
        "state_digest": column("VARCHAR", "b.state_digest", "digest of the training state that it wrote"),
        "config_digest": column("VARCHAR", "b.config_digest", "digest of the options that it read"),
        "inputs": column("MAP(VARCHAR, VARCHAR)", "b.inputs", "digest of each input, by name"),
        "values": column("VARCHAR", 'b."values"', "JSON object of small results that later steps read"),
        "metrics": column("MAP(VARCHAR, DOUBLE)", "b.metrics", "read one by `metrics['loss']`; see metrics.md"),
        "timings": column("MAP(VARCHAR, DOUBLE)", "b.timings", "seconds, by activity"),
        "device": column("VARCHAR", "b.device", "processor or GPU that computed the step"),
        "threads": column("BIGINT", "b.threads", ""),
        "host": column("VARCHAR", "b.host", ""),
        "versions": column("MAP(VARCHAR, VARCHAR)", "b.versions", "versions of the packages in use"),
        "files": column("BIGINT", "b.files", "number of files of the snapshot"),
        "bytes": column("BIGINT", "b.bytes", "size of all files"),
        "rows": column("BIGINT", 'b."rows"', "number of rows of all tables"),
    },
)
COSTS = View(
    "costs",
    "the cost of a step; see `steps` for the rest of its commit",
    "cairn_commits b",
    {
        **OF_RUN,
        "iteration": column("BIGINT", "b.iteration", ""),
        "step": column("VARCHAR", "b.step", ""),
        "shard": column("VARCHAR", "b.shard", ""),
        "seconds": column("DOUBLE", "b.committed_at - b.started_at", "from start to commit of the committed attempt"),
        "generating": column(
            "DOUBLE", "b.timings['generate']", "of these, the seconds in which a rollout engine generated"
        ),
        "prompt_tokens": column("DOUBLE", "b.metrics['prompt_tokens']", "prompt tokens sent to rollout engines"),
        "cached_tokens": column("DOUBLE", "b.metrics['cached_tokens']", "of these, the tokens found in a prefix cache"),
        "response_tokens": column("DOUBLE", "b.metrics['response_tokens']", "tokens generated"),
        "trained_tokens": column(
            "DOUBLE", "CASE WHEN b.step = 'train' THEN b.metrics['tokens'] END", "tokens trained on, prompts included"
        ),
        "bytes": column("BIGINT", "b.bytes", "bytes written"),
        "device": column("VARCHAR", "b.device", ""),
        "threads": column("BIGINT", "b.threads", "threads of the engine that computed the step"),
        "host": column("VARCHAR", "b.host", ""),
    },
)


# Views of evaluations: `evals` of runs, and `evaluations`, which the store holds by their weights.


EVALS = View(
    "evals",
    "a sample of a benchmark",
    "cairn_eval b",
    {
        **OF_RUN,
        "iteration": column(
            "BIGINT", "b.iteration", "iteration after which it was evaluated; version 0 is in the first"
        ),
        "weight_version": column("BIGINT", "b.weight_version", ""),
        "benchmark": column("VARCHAR", "b.benchmark", ""),
        "prompt_index": column("BIGINT", "b.prompt_index", "row of the benchmark"),
        "sample_index": column("INTEGER", "b.sample_index", ""),
        "prompt": column("VARCHAR", "b.prompt_text", ""),
        "response": column("VARCHAR", "b.response_text", ""),
        "response_tokens": column("BIGINT", "len(b.response_ids)", ""),
        "response_ids": column("INTEGER[]", "b.response_ids", ""),
        "log_probs": column(
            "FLOAT[]", "b.log_probs", "log-probs of the response tokens; NULL: an earlier version stored none"
        ),
        "reward": column("FLOAT", "b.reward", "NULL: failed"),
        "label": column("VARCHAR", "b.label", "expected answer"),
        "finish_reason": column("VARCHAR", "b.finish_reason", ""),
        "status": column("VARCHAR", "b.status", ""),
        "error": column("VARCHAR", "b.error", ""),
        "seed": column("UBIGINT", "b.seed", ""),
    },
)
EVALUATIONS = View(
    "evaluations",
    "a sample of a result that the store holds by its weights, from `cairn eval`, a schedule or another process",
    "cairn_evaluations b",
    {
        "result": column("VARCHAR", "b.result", "store path of the result's folder"),
        "run": column("VARCHAR", "b.run", "run whose weights were evaluated; NULL: the weights are a folder's"),
        "iteration": column(
            "BIGINT", "b.iteration", "iteration that made the weights; NULL: a folder's, or the run's initial weights"
        ),
        "weight_version": column("BIGINT", "b.weight_version", ""),
        "model": column("VARCHAR", "b.model", "folder of the weights; NULL: the weights are a run's"),
        "weights": column("VARCHAR", "b.weights", "digest of the weights"),
        "tokenizer": column("VARCHAR", "b.tokenizer", "digest of the tokenizer's content"),
        "engine": column("VARCHAR", "b.engine", ""),
        "dtype": column("VARCHAR", "b.dtype", ""),
        "settings": column("VARCHAR", "b.settings", "JSON object of everything else that the result depends on"),
        "score": column("DOUBLE", "b.score", "avg@n of the whole result"),
        "metrics": column("VARCHAR", "b.metrics", "JSON object of all figures of the result"),
        "committed_at": column("TIMESTAMPTZ", "to_timestamp(b.committed_at)", "when the result was committed"),
        "benchmark": column("VARCHAR", "b.benchmark", ""),
        "prompt_index": column("BIGINT", "b.prompt_index", "row of the benchmark"),
        "prompt_id": column("VARCHAR", "b.prompt_id", "identifier of the row"),
        "sample_index": column("INTEGER", "b.sample_index", ""),
        "prompt": column("VARCHAR", "b.prompt_text", ""),
        "response": column("VARCHAR", "b.response_text", ""),
        "response_tokens": column("BIGINT", "len(b.response_ids)", ""),
        "response_ids": column("INTEGER[]", "b.response_ids", ""),
        "log_probs": column("FLOAT[]", "b.log_probs", "log-probs of the response tokens"),
        "answer": column("VARCHAR", "b.answer", "answer that the grader found in the response"),
        "reward": column("DOUBLE", "b.reward", "NULL: failed"),
        "components": column("VARCHAR", "b.components", "JSON object of the grader's other results"),
        "label": column("VARCHAR", "b.label", "expected answer"),
        "grader": column("VARCHAR", "b.grader", ""),
        "grader_version": column("VARCHAR", "b.grader_version", ""),
        "finish_reason": column("VARCHAR", "b.finish_reason", ""),
        "status": column("VARCHAR", "b.status", "`completed`, `truncated` or `failed`"),
        "error": column("VARCHAR", "b.error", ""),
        "seed": column("UBIGINT", "b.seed", ""),
        "seconds": column("FLOAT", "b.seconds", "from acceptance of the sample to its end"),
    },
)


__all__ = ["VIEWS", "Column", "View"]

VIEWS: dict[str, View] = {
    view.name: view
    for view in (RUNS, STEPS, GROUPS, SAMPLES, SEGMENTS, CALLS, REWARDS, ADVANTAGES, TOKENS, EVALS, EVALUATIONS, COSTS)
}
"""All views, by name."""
