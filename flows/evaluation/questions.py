"""What a benchmark asks of a model, from its definition and the model's tokenizer."""

from collections.abc import Sequence
from typing import Any

from cairn.configs.schema.benchmark import Benchmark
from cairn.engines.types import SamplingParams
from cairn.tasks.benchmarks.digests import benchmark_digests, benchmark_grader, grader_config
from cairn.tasks.benchmarks.rows import graded_part, open_prompts
from cairn.tasks.benchmarks.sample import EvaluatedSample
from cairn.tasks.benchmarks.summary import summary
from cairn.tasks.questions import Questions

SEED = 42
"""Of all draws, unless said: as a recipe's."""


def questions_of(benchmark: Benchmark, tokenizer: Any, seed: int = SEED) -> Questions:
    """The questions of a benchmark. Raises BadData where its rows are not there or do not fit, and BadPlugin."""
    prompts = open_prompts(benchmark, tokenizer)
    digests = benchmark_digests(benchmark, benchmark_grader(benchmark), prompts.fingerprint)
    sampling = benchmark.sampling
    rows = [prompts.row(index) for index in range(len(prompts))]
    return Questions(
        name=benchmark.name,
        rows=rows,
        n=sampling.n,
        sampling=SamplingParams(
            max_new_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        ),
        seed=seed,
        grader=grader_config(benchmark),
        measure=_measure,
        settings={
            "version": benchmark.version,
            "seed": seed,
            "prompt": digests["prompt"],
            "sampling": digests["sampling"],
            "grader": digests["grader"],
            "source": digests["source"],
            **prompts.dated(rows),
        },
        described={"benchmark": benchmark.model_dump(mode="json"), "rows": len(prompts), "data": prompts.path},
        graded_part=lambda response: graded_part(benchmark, response),
    )


def _measure(samples: Sequence[EvaluatedSample]) -> dict[str, float]:
    found = summary(samples)
    return {**found.metrics(), "questions": found.questions, "samples": found.samples, "n": found.n}
