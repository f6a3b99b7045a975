"""A run's own benchmarks (`eval.benchmarks`), evaluated apart from it, by the name that they have there.

Questions, sampling and seeds are the run's, so its own evaluations and these have the same draws. What the run sampled
itself at that iteration is taken over and graded by the grader of now: nothing is sampled again. The run's evaluations
kept no log-probs, so such a result has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.configs.schema.evaluation import BenchmarkConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.types import SamplingParams
from cairn.storage import canonical
from cairn.storage.commits import Commit, Step
from cairn.storage.ledger import Ledger
from cairn.storage.snapshots import read_table
from cairn.tasks.benchmarks import measure
from cairn.tasks.benchmarks.sample import EvaluatedSample
from cairn.tasks.benchmarks.summary import summary
from cairn.tasks.data import PromptData
from cairn.tasks.evaluate import eval_shard
from cairn.tasks.evaluation import Questions, Sampled
from cairn.tasks.plugin_sources import source_digest
from cairn.tasks.rewards import get_grader

SINGLE_TURN = "single_turn"


@dataclass(frozen=True)
class OwnBenchmark:
    """One of a run's own."""

    config: RunConfig
    benchmark: BenchmarkConfig

    @property
    def name(self) -> str:
        """In metrics, commits and results."""
        return self.benchmark.name

    def questions(self, tokenizer: object) -> Questions:
        """What it asks. Raises BadData and BadPlugin."""
        own, reward = self.benchmark, self.config.reward
        if own.rm_type is not None:
            reward = reward.model_copy(update={"rm_type": own.rm_type, "custom_rm_path": None})
        prompts = PromptData.open(own, own.path, tokenizer)
        grader, stop = get_grader(reward), self.config.rollout.rollout_stop_token_ids
        asked = own.model_dump(mode="json", exclude={"name", "path", "rm_type"})
        return Questions(
            name=own.name,
            rows=[prompts.row(index) for index in range(len(prompts))],
            n=own.n_samples_per_eval_prompt,
            sampling=SamplingParams(own.max_response_len, own.temperature, own.top_p, own.top_k, stop),
            seed=self.config.seed,
            grader=reward,
            measure=self._measure,
            settings={
                "asked": canonical.digest(asked),
                "seed": self.config.seed,
                "grader": f"{grader.name} {grader.version}",
                "source": canonical.digest([prompts.fingerprint, len(prompts), own.path.partition("@[")[2]]),
                "metric": source_digest(own.metric) if "." in own.metric else own.metric,
                "stop": list(stop),
            },
            described={"benchmark": own.model_dump(mode="json"), "rows": len(prompts), "data": prompts.path},
        )

    def _measure(self, samples: Sequence[EvaluatedSample]) -> dict[str, float]:
        found = summary(samples)
        counts = {"questions": found.questions, "samples": found.samples, "n": found.n}
        return {**found.metrics(), **counts, **measure(self.benchmark.metric, samples)}


def own_benchmarks(config: RunConfig) -> dict[str, OwnBenchmark]:
    """Those of a run by name; none where its samples go through user code, which an evaluation does not run."""
    if config.rollout.custom_generate_function_path != SINGLE_TURN:
        return {}
    return {one.name: OwnBenchmark(config, one) for one in config.eval.benchmarks}


def sampled_by_the_run(ledger: Ledger, synced: Commit, own: OwnBenchmark, questions: Questions) -> Sampled | None:
    """What the run itself sampled of these questions with the weights that `synced` published; None where it did not,
    or not of these very questions."""
    assert synced.weight_version_out is not None
    commit = ledger.find(synced.iteration, Step.EVAL, eval_shard(own.benchmark, synced.weight_version_out))
    if commit is None:
        return None
    (output,) = commit.outputs
    rows = read_table(ledger.store, commit.run, output).to_pylist()
    texts = {row.index: row.prompt_text for row in questions.rows}
    asked = [(one.group_id, one.index, one.seed, texts[one.group_id]) for one in questions.requests()]
    if asked != [(row["prompt_index"], row["sample_index"], row["seed"], row["prompt_text"]) for row in rows]:
        return None
    if any(row["segments"] is not None for row in rows):
        return None
    samples = [
        {
            "sample_index": row["sample_index"],
            "response_ids": row["response_ids"],
            "log_probs": None,
            "finish_reason": row["finish_reason"],
            "error": row["error"] if not row["response_ids"] else None,
            "seconds": None,
        }
        for row in rows
    ]
    return Sampled(samples, commit.environment, f"{commit.run}/{commit.name}@{commit.digest}")
