"""Evaluation of models on benchmarks: each result is looked up first, and computed where the store has none."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from cairn.configs.schema.evaluation import Benchmark, EngineOptions
from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.models.configs import context_length
from cairn.engines.models.folders import check_model_folder
from cairn.engines.models.tokenizers import load_tokenizer, tokenizer_digest
from cairn.engines.rollout.plan import Place, kind_of, make_engine
from cairn.engines.types.errors import BadModel
from cairn.engines.types.types import SamplingParams
from cairn.flows.driver.sources import environment
from cairn.flows.driver.validation import unstopped_end
from cairn.flows.evaluation.benchmarks import OwnBenchmark, sampled_by_the_run
from cairn.flows.evaluation.models import ModelFolder
from cairn.storage.evals import Evaluation, find_or_claim
from cairn.storage.ledger.leases import LeaseState
from cairn.storage.store.store import Store
from cairn.tasks.evaluation.benchmarks.rows import (
    benchmark_digests,
    benchmark_grader,
    graded_part,
    grader_config,
    open_prompts,
)
from cairn.tasks.evaluation.compute import Served, compute
from cairn.tasks.evaluation.questions import Questions

# The evaluation's own engine, in this process; it belongs to no run and no cluster.


CALL_TIMEOUT = 120.0
"""Seconds until an engine must respond to any request except one to generate."""
START_TIMEOUT = 600.0
"""Seconds until an engine must serve."""


@contextmanager
def own_engine(folder: str, options: EngineOptions, stop: tuple[str, ...] = ()) -> Iterator[Served]:
    """Yield an engine that serves a model folder. `stop`: strings that end responses. Raises BadModel, EngineDied and
    EngineTimeout."""
    config = options.rollout(stop)
    plans = kind_of(options.engine).plan(config, False).engines
    if len(plans) != 1 or plans[0].nnodes != 1:
        raise BadModel("an evaluation has one engine on one machine: leave out options that request several")
    with tempfile.TemporaryDirectory(prefix="cairn-eval-") as logs:
        log = Path(logs) / "engine.log"
        transformers_logging.set_verbosity_error()  # errors say in one sentence what the library reports
        engine = make_engine(folder, config, plans[0], Place(), log, START_TIMEOUT, CALL_TIMEOUT)
        try:
            yield Served(SampleEngine(engine.open, engine.abort).generate, engine.environment)
        finally:
            close: Callable[[], None] | None = getattr(engine, "close", None)
            if close is not None:
                close()


def require_room(folder: str, longest_prompt: int) -> None:
    """Raise BadModel unless a benchmark's longest prompt, in tokens, leaves room for a response."""
    context = context_length(check_model_folder(folder))
    if longest_prompt >= context:
        raise BadModel(
            f"the benchmark's longest prompt has {longest_prompt} tokens, but the model in {folder} has a context of "
            f"{context}: use a model with a longer context, or fewer rows with --data FILE@[A:B]"
        )


# Questions of a benchmark, from its definition and the model's tokenizer.


SEED = 42
"""Default seed of all draws, equal to a recipe's default."""


def questions_of(benchmark: Benchmark, tokenizer: Any, seed: int = SEED) -> Questions:
    """Return the questions of a benchmark. Raises BadData where its rows are missing or do not fit, and BadPlugin."""
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
        settings={
            "version": benchmark.version,
            "seed": seed,
            "prompt": digests["prompt"],
            "sampling": digests["sampling"],
            "grader": digests["grader"],
            "source": digests["source"],
            **prompts.clock_key(rows),
        },
        described={"benchmark": benchmark.model_dump(mode="json"), "rows": len(prompts), "data": prompts.path},
        graded_part=lambda response: graded_part(benchmark, response),
    )


@dataclass(frozen=True)
class Watcher:
    """Callbacks for the progress of an evaluation."""

    says: Callable[[str], None] = lambda sentence: None
    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    """Function of (benchmark and model, number of finished samples, number of all samples)."""


@dataclass(frozen=True)
class EvaluationResult:
    """A result, and whether it was computed now."""

    model: str
    """Name of the model in the request."""
    result: Evaluation
    computed: bool
    """False: it was in the store, and nothing was computed."""

    @property
    def source(self) -> str:
        """Source of the result, for people."""
        return "computed" if self.computed else "found in the store, not computed"


def evaluate_models(
    store: Store,
    models: Sequence[ModelFolder],
    benchmarks: Sequence[Benchmark | OwnBenchmark],
    *,
    seed: int = SEED,
    watcher: Watcher | None = None,
) -> Iterator[EvaluationResult]:
    """Evaluate every model on every benchmark, in this order; yield each result as soon as it is available.

    An engine starts for a model when its first result is missing, and serves the model's other benchmarks too. Raises
    BadModel, BadData and BadPlugin before a model's engine starts, and the errors of `compute`.
    """
    watcher = watcher or Watcher()
    for model in models:
        check_model_folder(model.base)
        tokenizer = load_tokenizer(model.base)
        all_questions = [
            one.questions(tokenizer) if isinstance(one, OwnBenchmark) else questions_of(one, tokenizer, seed)
            for one in benchmarks
        ]
        for questions in all_questions:
            require_room(model.base, max(len(row.prompt_ids) for row in questions.rows))
            sampling = questions.sampling
            if why := unstopped_end(tokenizer, model.base, sampling.stop_token_ids, sampling.stop):
                watcher.says(f"{questions.name} on {model.name}: {why}")
        with ExitStack() as stack:
            stack.callback(model.close)
            serving = _EnginesOfModel(stack, model, watcher)
            for benchmark, questions in zip(benchmarks, all_questions, strict=True):
                key = questions.key(model.weights, tokenizer_digest(tokenizer), model.options, model.base)
                name = f"{questions.name} on {model.name}"
                stored = find_or_claim(store, key, partial(_waiting, watcher, name))
                if isinstance(stored, Evaluation):
                    yield EvaluationResult(model.name, stored, computed=False)
                    continue
                with stored as claim:
                    sampled = None
                    if isinstance(benchmark, OwnBenchmark):
                        sampled = sampled_by_the_run(store, model.origin, benchmark, questions, model.options)
                    if sampled is not None:
                        watcher.says(f"{name}: grading the run's own samples")
                    result = compute(
                        claim,
                        questions,
                        tokenizer,
                        partial(serving, questions.sampling.stop),
                        model.origin,
                        environment(),
                        partial(watcher.progress, name),
                        sampled,
                    )
                yield EvaluationResult(model.name, result, computed=True)


def _waiting(watcher: Watcher, name: str, holder: LeaseState | None) -> None:
    watcher.says(f"{name}: {holder or 'another process'} computes it; waiting for the result")


class _EnginesOfModel:
    """Engine of a model, started at the first call, and restarted for other stop strings: a server with a tokenizer may
    end responses at more tokens."""

    def __init__(self, stack: ExitStack, model: ModelFolder, watcher: Watcher) -> None:
        self._stack, self._model, self._watcher = stack.enter_context(ExitStack()), model, watcher
        self._served: Served | None = None
        self._stop: tuple[str, ...] = ()

    def __call__(self, stop: tuple[str, ...]) -> Served:
        if self._served is None or self._stop != stop:
            self._stack.close()
            self._stop = stop
            options = self._model.options
            folder = self._model.folder()
            self._watcher.says(f"{self._model.name}: starting {options.engine} in {options.dtype}")
            self._served = self._stack.enter_context(own_engine(folder, options, stop))
        return self._served
