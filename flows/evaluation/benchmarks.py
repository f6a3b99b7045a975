"""Benchmarks of a request: by name or file, or a run's own."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cairn.configs.catalogue import load_benchmark
from cairn.configs.errors import ConfigError
from cairn.configs.schema.evaluation import Benchmark, BenchmarkConfig, EngineOptions
from cairn.configs.schema.run import RunConfig
from cairn.engines.agents.episodes.user_code import SINGLE_TURN
from cairn.engines.rollout.plan import rounds_weights
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import GENERATED_EVAL
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.store.store import Store
from cairn.tasks.data.prompts import PromptData
from cairn.tasks.evaluation.compute import Sampled
from cairn.tasks.evaluation.evaluate import eval_shard
from cairn.tasks.evaluation.questions import Questions, own_questions
from cairn.tasks.grading.graders import get_grader, named_by_row, rows_name_graders
from cairn.tasks.grading.opening import grader_args

# A run's own benchmarks (`eval.benchmarks`), evaluated apart from the run, under the same names.
#
# Questions, sampling and seeds are the run's, so its own evaluations and these have the same draws, and the same result
# (`cairn.tasks.evaluation.evaluate`). Where a sample failed and the run has no result, the samples of that iteration
# are read from its ledger and graded by the current grader: nothing is sampled again.


@dataclass(frozen=True)
class OwnBenchmark:
    """A run's own benchmark."""

    config: RunConfig
    benchmark: BenchmarkConfig

    @property
    def name(self) -> str:
        """Name in metrics, commits and results."""
        return self.benchmark.name

    def questions(self, tokenizer: object) -> Questions:
        """Return the benchmark's questions. Raises BadData and BadPlugin."""
        own = self.benchmark
        reward = self.config.reward.of(own.rm_type)
        data = PromptData.open(own, own.path, tokenizer)
        args = grader_args(self.config)
        graders = [get_grader(reward, args)]
        if rows_name_graders(reward) and own.metadata_key is not None:
            named = {named_by_row(reward, data.row(index).metadata) for index in range(len(data))}
            graders += [get_grader(reward.of(name), args) for name in sorted(filter(None, named))]
        graded_by = ", ".join(f"{grader.name} {grader.version}" for grader in graders)
        return own_questions(self.config, own, data, graded_by=graded_by, grader=reward, args=args)


def own_benchmarks(config: RunConfig) -> dict[str, OwnBenchmark]:
    """Return a run's own benchmarks by name; none where its samples go through user code, which an evaluation does not
    run."""
    if config.rollout.custom_generate_function_path != SINGLE_TURN:
        return {}
    return {one.name: OwnBenchmark(config, one) for one in config.eval.benchmarks}


def sampled_by_the_run(
    store: Store, origin: Mapping[str, Any], own: OwnBenchmark, questions: Questions, options: EngineOptions
) -> Sampled | None:
    """Return the run's own samples of these questions, from an engine of the same kind and number format. `origin`:
    that of the weights, `cairn.storage.evals.Evaluation.origin`. Returns None where there are none, or not for exactly
    these questions, or from rounded weights."""
    if "run" not in origin or EngineOptions.of_run(own.config.rollout, {}).settings() != options.settings():
        return None
    if rounds_weights(own.config):
        return None
    ledger, iteration = Ledger.open(store, origin["run"]), origin["iteration"] or 0
    commit = ledger.find(iteration, Step.EVAL, eval_shard(own.benchmark, origin["weight_version"]))
    if commit is None:
        return None
    (output,) = commit.outputs
    rows = read_table(ledger.store, commit.run, output).to_pylist()
    texts = {row.index: row.prompt_text for row in questions.rows}
    requested = [(one.group_id, one.index, one.seed, texts[one.group_id]) for one in questions.requests()]
    if requested != [(row["prompt_index"], row["sample_index"], row["seed"], row["prompt_text"]) for row in rows]:
        return None
    if any(row["segments"] is not None for row in rows):
        return None
    samples = [
        {
            "group_id": row["prompt_index"],
            **{name: row.get(name) for name in ("sample_index", "response_ids", "log_probs", "finish_reason")},
            "error": None if row["response_ids"] else row["error"],
        }
        for row in rows
    ]
    table = pa.Table.from_pylist(samples, GENERATED_EVAL)
    return Sampled(table, commit.environment, f"{commit.run}/{commit.name}@{commit.digest}")


def benchmarks_of(
    names: Sequence[str],
    *,
    n: int | None = None,
    data: Sequence[str] = (),
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    own: Mapping[str, OwnBenchmark] | None = None,
    seed: int | None = None,
) -> list[Benchmark | OwnBenchmark]:
    """Return benchmarks by name or YAML file, in order.

    Args:
        n: number of responses to each question, instead of the benchmark's own.
        data: files with their rows: `FILE` for all, `NAME=FILE` for one of them.
        changes: values for other options, by section.
        own: benchmarks of the evaluated run, as its configuration defines them. Their names take precedence, and the
            other arguments do not change them.
        seed: seed of all draws, used by the caller; this function only rejects it where it would change nothing.

    Raises ConfigError, which lists every problem of a benchmark at once, and where an argument would change no named
    benchmark.
    """
    files: dict[str | None, str] = {}
    for argument in data:
        name, equals, file = argument.partition("=")
        is_for_one = equals and name in names
        files[name if is_for_one else None] = file if is_for_one else argument
    fixed = set(own or ()) & set(names)
    unchangeable = fixed & files.keys()
    if fixed >= set(names) and (n is not None or data or changes or seed is not None):
        unchangeable = fixed
    if unchangeable:
        raise ConfigError(
            [
                f"{name!r} is a benchmark of the run and is evaluated as in the run, so its rows, options, number of "
                "responses and seed cannot be changed; write a YAML file of your own for another benchmark"
                for name in sorted(filter(None, unchangeable))
            ]
        )
    benchmarks: list[Benchmark | OwnBenchmark] = []
    for name in names:
        if own is not None and name in own:
            benchmarks.append(own[name])
            continue
        sections = {section: dict(values) for section, values in (changes or {}).items()}
        if n is not None:
            sections.setdefault("sampling", {})["n"] = n
        file_of = files.get(name, files.get(None))
        if file_of is not None:
            sections.setdefault("source", {})["data"] = file_of
        benchmarks.append(load_benchmark(name, sections))
    twice = [name for name, count in Counter(one.name for one in benchmarks).items() if count > 1]
    if twice:
        raise ConfigError([f"the benchmark {min(twice)!r} is named twice: name each once"])
    return benchmarks
