"""Questions that an evaluation puts to a model, and the key of its result.

A sample's seed depends on the benchmark's name, its question and its number. So the draws of two models are equal, and
differences come from the weights.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cairn.configs.schema.evaluation import BenchmarkConfig, EngineOptions
from cairn.configs.schema.reward import RewardConfig
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.trajectories import SampleRequest
from cairn.engines.types.types import SamplingParams
from cairn.storage.evals import EvaluationKey
from cairn.storage.store import canonical
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.durable.plugin_sources import source_digest
from cairn.tasks.evaluation.benchmarks import measure
from cairn.tasks.evaluation.benchmarks.summary import summary
from cairn.tasks.grading.graded import GradedSample


@dataclass(frozen=True)
class Questions:
    """Questions for a model, and the grading of its answers."""

    name: str
    """Name of the benchmark."""
    rows: Sequence[PromptRow]
    n: int
    """Responses to each question."""
    sampling: SamplingParams
    seed: int
    settings: Mapping[str, Any]
    """Part of the result's key, without what the engine adds."""
    described: Mapping[str, Any]
    """Full description of the benchmark, for people."""
    metric: str | None = None
    """Metric of the score; None for the mean reward."""
    grader: RewardConfig | None = None
    """Configuration of the grader; None if the caller has it running already, as a run has."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Values for a grader written for slime."""
    graded_part: Callable[[str], str] = lambda response: response
    """Function that returns the part of a response that the grader sees."""

    def requests(self) -> list[SampleRequest]:
        """Return the requests for all samples, question after question."""
        return [
            SampleRequest(
                row.index,
                index,
                row.prompt_ids,
                eval_seed(self.seed, self.name, row.index, index),
                prompt=row.prompt_text,
                label=row.label,
                metadata=row.metadata or {},
                images=row.images,
            )
            for row in self.rows
            for index in range(self.n)
        ]

    def measure(self, samples: Sequence[GradedSample]) -> dict[str, float]:
        """Return the metrics of all samples, with the score under `score`. Raises BadPlugin."""
        figures = summary(samples)
        counts = {"questions": figures.questions, "samples": figures.samples, "n": figures.n}
        own = {} if self.metric is None else measure(self.metric, samples)
        return {**figures.metrics(), **counts, **own}

    def key(self, weights: str, tokenizer: str, options: EngineOptions, folder: str) -> EvaluationKey:
        """Return the key of the result. Raises BadModel.

        Args:
            weights: their digest.
            tokenizer: its digest.
            folder: the model's, for the tokens that end a response.
        """
        from cairn.engines.models.folders import end_tokens  # PyTorch takes seconds to import

        settings = {**self.settings, **options.settings(), "end_tokens": sorted(end_tokens(folder))}
        return EvaluationKey(weights=weights, tokenizer=tokenizer, benchmark=self.name, settings=settings)


def eval_seed(run_seed: int, benchmark: str, prompt_index: int, sample_index: int) -> int:
    """Return the 64-bit seed of a benchmark's sample. It differs from the seeds of training samples and of other
    benchmarks: the hashed text contains the benchmark's name, and begins as no training sample's does."""
    words = f"eval/{benchmark}/{run_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def own_questions(
    config: RunConfig,
    benchmark: BenchmarkConfig,
    prompts: PromptData,
    *,
    graded_by: str,
    grader: RewardConfig | None = None,
    args: Mapping[str, Any] = MappingProxyType({}),
) -> Questions:
    """Return the questions of a run's own benchmark. Raises BadPrompt. `graded_by`: name and version of the grader."""
    without = {"name", "path", "rm_type"}
    if not benchmark.multimodal_keys:  # results of texts keep the keys that they had before there were images
        without |= {"multimodal_keys", "min_pixels", "max_pixels"}
    rows = [prompts.row(index) for index in range(len(prompts))]
    stop_token_ids, stop = config.rollout.rollout_stop_token_ids, config.rollout.rollout_stop
    return Questions(
        name=benchmark.name,
        rows=rows,
        n=benchmark.n_samples_per_eval_prompt,
        sampling=SamplingParams(
            max_new_tokens=benchmark.max_response_len,
            temperature=benchmark.temperature,
            top_p=benchmark.top_p,
            top_k=benchmark.top_k,
            stop_token_ids=stop_token_ids,
            stop=stop,
        ),
        seed=config.seed,
        grader=grader,
        args=args,
        metric=benchmark.metric,
        settings={
            "asked": canonical.digest(benchmark.model_dump(mode="json", exclude=without)),
            "seed": config.seed,
            "grader": graded_by,
            "source": canonical.digest([prompts.fingerprint, len(prompts), benchmark.path.partition("@[")[2]]),
            "metric": source_digest(benchmark.metric) if "." in benchmark.metric else benchmark.metric,
            "stop": list(stop_token_ids),
            **({"stop_strings": list(stop)} if stop else {}),
            **prompts.clock_key(rows),
        },
        described={"benchmark": benchmark.model_dump(mode="json"), "rows": len(prompts), "data": prompts.path},
    )
