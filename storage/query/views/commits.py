"""Views of what stands in manifests and commits: `runs`, `steps`, `costs`."""

from cairn.storage.query.views.view import OF_RUN, View, column, time

RUNS = View(
    "runs",
    "a run",
    "cairn_runs b",
    {
        "run": column("VARCHAR", "b.run", "its name"),
        "id": column("VARCHAR", "b.id", "random, unlike that of every other run"),
        "parent": column("VARCHAR", "b.parent", "the run that it was forked from"),
        "parent_iteration": column("BIGINT", "b.parent_iteration", "the last iteration that the two share"),
        "created_at": column("TIMESTAMPTZ", time("created_at"), ""),
        "code_version": column("VARCHAR", "b.code_version", "of Cairn, that created it: JSON"),
        "last_iteration": column("BIGINT", "b.last_iteration", "the newest with a commit"),
        "model": column("VARCHAR", "b.config->>'$.model.path'", ""),
        "data": column("VARCHAR", "b.config->>'$.data.path'", ""),
        "seed": column("BIGINT", "(b.config->>'$.seed')::BIGINT", ""),
        "inputs": column("VARCHAR", "b.inputs", "JSON object of the digests of model, data and the like"),
        "config": column(
            "VARCHAR", "b.config", "JSON object; take options by `config->>'$.rollout.rollout_temperature'`"
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
        "shard": column("VARCHAR", "b.shard", "NULL where the step has none"),
        "name": column("VARCHAR", "b.name", "as `inputs` of other commits names it"),
        "digest": column("VARCHAR", "b.digest", "SHA-256 of the commit"),
        "attempt": column("VARCHAR", "b.attempt", "the folder of its files"),
        "epoch": column("BIGINT", "b.epoch", "the driver's lease"),
        "terms": column("BIGINT", "b.terms", "number of the terms that it was made under: see upgrades"),
        "started_at": column("TIMESTAMPTZ", time("started_at"), ""),
        "committed_at": column("TIMESTAMPTZ", time("committed_at"), ""),
        "seconds": column("DOUBLE", "b.committed_at - b.started_at", "from its start to its commit"),
        "weight_version_in": column("BIGINT", "b.weight_version_in", "optimizer steps behind the weights that it read"),
        "weight_version_out": column("BIGINT", "b.weight_version_out", "and behind those that it left"),
        "state_digest": column("VARCHAR", "b.state_digest", "of the training state that it left"),
        "config_digest": column("VARCHAR", "b.config_digest", "of the options that it read"),
        "inputs": column("MAP(VARCHAR, VARCHAR)", "b.inputs", "digest of everything that it read, by name"),
        "values": column("VARCHAR", 'b."values"', "JSON object of small results that later steps read"),
        "metrics": column("MAP(VARCHAR, DOUBLE)", "b.metrics", "take one by `metrics['loss']`; see metrics.md"),
        "timings": column("MAP(VARCHAR, DOUBLE)", "b.timings", "seconds, by what they went into"),
        "device": column("VARCHAR", "b.device", "processor or GPU that computed"),
        "threads": column("BIGINT", "b.threads", ""),
        "host": column("VARCHAR", "b.host", ""),
        "versions": column("MAP(VARCHAR, VARCHAR)", "b.versions", "of the packages that computed"),
        "files": column("BIGINT", "b.files", "of its snapshot"),
        "bytes": column("BIGINT", "b.bytes", "of all its files"),
        "rows": column("BIGINT", 'b."rows"', "of all its tables"),
    },
)
COSTS = View(
    "costs",
    "what a step took; see `steps` for the rest of its commit",
    "cairn_commits b",
    {
        **OF_RUN,
        "iteration": column("BIGINT", "b.iteration", ""),
        "step": column("VARCHAR", "b.step", ""),
        "shard": column("VARCHAR", "b.shard", ""),
        "seconds": column("DOUBLE", "b.committed_at - b.started_at", "of the committed attempt, from start to commit"),
        "generating": column("DOUBLE", "b.timings['generate']", "seconds of these in which a rollout engine generated"),
        "prompt_tokens": column("DOUBLE", "b.metrics['prompt_tokens']", "given to rollout engines"),
        "cached_tokens": column("DOUBLE", "b.metrics['cached_tokens']", "of these in a prefix cache"),
        "response_tokens": column("DOUBLE", "b.metrics['response_tokens']", "generated"),
        "trained_tokens": column(
            "DOUBLE", "CASE WHEN b.step = 'train' THEN b.metrics['tokens'] END", "trained on, prompts included"
        ),
        "bytes": column("BIGINT", "b.bytes", "written"),
        "device": column("VARCHAR", "b.device", ""),
        "threads": column("BIGINT", "b.threads", "of the engine that computed"),
        "host": column("VARCHAR", "b.host", ""),
    },
)
