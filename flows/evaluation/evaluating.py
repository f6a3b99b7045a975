"""From what is asked for to results: each looked up first, and computed where nobody has."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from cairn.configs.schema.benchmark import Benchmark
from cairn.engines.models import check_model_folder
from cairn.engines.tokenizers import tokenizer_digest
from cairn.flows.driver.sources import environment
from cairn.flows.driver.validation import load_tokenizer, unstopped_end
from cairn.flows.evaluation.engine import own_engine, require_room
from cairn.flows.evaluation.models import Evaluable
from cairn.flows.evaluation.own import OwnBenchmark
from cairn.flows.evaluation.questions import SEED, questions_of
from cairn.storage.evals import Claim, Evaluation, EvaluationKey, find_or_claim
from cairn.storage.leases import LeaseState
from cairn.storage.store import Store
from cairn.tasks.evaluation import Engines, compute
from cairn.tasks.questions import Questions


@dataclass(frozen=True)
class Watcher:
    """Who is told how an evaluation goes."""

    says: Callable[[str], None] = lambda sentence: None
    progress: Callable[[str, int, int], None] = lambda name, done, total: None
    """(benchmark and model, samples that are there, samples in all)."""


@dataclass(frozen=True)
class Found:
    """A result, and whether it was there."""

    model: str
    """As it was asked for."""
    result: Evaluation
    computed: bool
    """False: found, nothing computed."""


def evaluate_models(
    store: Store,
    models: Sequence[Evaluable],
    benchmarks: Sequence[Benchmark | OwnBenchmark],
    *,
    seed: int = SEED,
    watcher: Watcher | None = None,
) -> Iterator[Found]:
    """Every benchmark on every model, in this order; an engine starts for a model when a result is missing, and serves
    the others of that model too. Yields each as it is there.

    Raises BadModel, BadData and BadPlugin before anything of a model starts, and what `compute` raises."""
    watcher = watcher or Watcher()
    for model in models:
        check_model_folder(model.base)
        tokenizer = load_tokenizer(model.base)
        asked = [
            one.questions(tokenizer) if isinstance(one, OwnBenchmark) else questions_of(one, tokenizer, seed)
            for one in benchmarks
        ]
        for questions in asked:
            require_room(model.base, max(len(row.prompt_ids) for row in questions.rows))
            sampling = questions.sampling
            if why := unstopped_end(tokenizer, model.base, sampling.stop_token_ids, sampling.stop):
                watcher.says(f"{questions.name} on {model.name}: {why}")
        with ExitStack() as stack:
            stack.callback(model.close)
            serving = _Once(stack, model, watcher)
            for benchmark, questions in zip(benchmarks, asked, strict=True):
                key = questions.key(model.weights, tokenizer_digest(tokenizer), model.options, model.base)
                own = benchmark if isinstance(benchmark, OwnBenchmark) else None
                yield _evaluate(store, key, model, questions, tokenizer, serving, watcher, own)


def _evaluate(
    store: Store,
    key: EvaluationKey,
    model: Evaluable,
    questions: Questions,
    tokenizer: Any,
    serving: "_Once",
    watcher: Watcher,
    own: OwnBenchmark | None,
) -> Found:
    name = f"{questions.name} on {model.name}"

    def waiting(holder: LeaseState | None) -> None:
        watcher.says(f"{name}: {holder or 'another process'} computes it; waiting for the result")

    found = find_or_claim(store, key, waiting)
    if not isinstance(found, Claim):
        return Found(model.name, found, computed=False)
    with found:
        sampled = None if own is None else model.sampled(own, questions)
        if sampled is not None:
            watcher.says(f"{name}: grading what the run sampled itself")
        result = compute(
            found,
            questions,
            tokenizer,
            partial(serving, questions.sampling.stop),
            model.origin,
            environment(),
            lambda done, total: watcher.progress(name, done, total),
            sampled,
        )
    return Found(model.name, result, computed=True)


class _Once:
    """Engines of a model, started at the first call, and anew for other stop strings: a server with a tokenizer may
    end responses at more tokens."""

    def __init__(self, stack: ExitStack, model: Evaluable, watcher: Watcher) -> None:
        self._stack, self._model, self._watcher = stack.enter_context(ExitStack()), model, watcher
        self._engines: Engines | None = None
        self._stop: tuple[str, ...] = ()

    def __call__(self, stop: tuple[str, ...]) -> Engines:
        if self._engines is None or self._stop != stop:
            self._stack.close()
            self._stop = stop
            options = self._model.options
            folder = self._model.folder()
            self._watcher.says(f"{self._model.name}: starting {options.engine} in {options.dtype}")
            self._engines = self._stack.enter_context(own_engine(folder, options, stop))
        return self._engines
