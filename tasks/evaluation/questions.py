"""What an evaluation asks of a model, and what its result is known by.

A sample's seed comes from the benchmark's name, its question and its number, so that the draws of two models are the
same and differences are those of the weights.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cairn.configs.schema.evaluation import BenchmarkConfig, EngineOptions
from cairn.configs.schema.reward import RewardConfig
from cairn.engines.types.trajectories import SampleRequest
from cairn.engines.types.types import SamplingParams
from cairn.storage.evals import EvaluationKey
from cairn.storage.store import canonical
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.durable.plugin_sources import source_digest
from cairn.tasks.evaluation.benchmarks import measure
from cairn.tasks.evaluation.benchmarks.sample import EvaluatedSample
from cairn.tasks.evaluation.benchmarks.summary import summary

Measure = Callable[[Sequence[EvaluatedSample]], Mapping[str, float]]
"""Metrics of all samples, with the score among them under `score`."""


@dataclass(frozen=True)
class Questions:
    """What is asked of a model, and how its answers are graded."""

    name: str
    """Of the benchmark."""
    rows: Sequence[PromptRow]
    n: int
    """Responses to each."""
    sampling: SamplingParams
    seed: int
    measure: Measure
    settings: Mapping[str, Any]
    """Of the result's key, all but what the engine adds."""
    described: Mapping[str, Any] = field(default_factory=dict)
    """The benchmark in full, for people."""
    grader: RewardConfig | None = None
    """None: whoever asks has it at work already, as a run."""
    graded_part: Callable[[str], str] = lambda response: response
    """Of a response, what its grader sees."""

    def requests(self) -> list[SampleRequest]:
        """Of every sample, question after question."""
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

    def key(self, weights: str, tokenizer: str, options: EngineOptions, folder: str) -> EvaluationKey:
        """What the result is known by. `weights`, `tokenizer`: their digests. `folder`: of the model, for the tokens
        that end a response. Raises BadModel."""
        from cairn.engines.models.folders import end_tokens  # PyTorch takes seconds to import

        settings = {**self.settings, **options.settings(), "end_tokens": sorted(end_tokens(folder))}
        return EvaluationKey(weights=weights, tokenizer=tokenizer, benchmark=self.name, settings=settings)


def eval_seed(run_seed: int, benchmark: str, prompt_index: int, sample_index: int) -> int:
    """64-bit seed of a benchmark's sample, another one than any training sample's or other benchmark's: it depends on
    the benchmark's name, and what it is made of begins as no training sample's does."""
    words = f"eval/{benchmark}/{run_seed}/{prompt_index}/{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


def own_questions(
    benchmark: BenchmarkConfig,
    prompts: PromptData,
    *,
    seed: int,
    stop_token_ids: tuple[int, ...],
    stop: tuple[str, ...],
    graded_by: str,
    grader: RewardConfig | None = None,
) -> Questions:
    """Those of a run's own benchmark. `seed`: the run's. `stop_token_ids`, `stop`: its tokens and strings that end a
    response. `graded_by`: name and version of the grader. Raises BadPrompt."""
    without = {"name", "path", "rm_type"}
    if not benchmark.multimodal_keys:  # results of texts keep the keys that they had before there were images
        without |= {"multimodal_keys", "min_pixels", "max_pixels"}
    asked = benchmark.model_dump(mode="json", exclude=without)
    rows = [prompts.row(index) for index in range(len(prompts))]

    def measured(samples: Sequence[EvaluatedSample]) -> dict[str, float]:
        found = summary(samples)
        counts = {"questions": found.questions, "samples": found.samples, "n": found.n}
        return {**found.metrics(), **counts, **measure(benchmark.metric, samples)}

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
        seed=seed,
        grader=grader,
        measure=measured,
        settings={
            "asked": canonical.digest(asked),
            "seed": seed,
            "grader": graded_by,
            "source": canonical.digest([prompts.fingerprint, len(prompts), benchmark.path.partition("@[")[2]]),
            "metric": source_digest(benchmark.metric) if "." in benchmark.metric else benchmark.metric,
            "stop": list(stop_token_ids),
            **({"stop_strings": list(stop)} if stop else {}),
            **prompts.dated(rows),
        },
        described={"benchmark": benchmark.model_dump(mode="json"), "rows": len(prompts), "data": prompts.path},
    )
