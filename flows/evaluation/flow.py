"""The body of the flow `evaluate` of `cairn.flows.deployments.flows`, which starts from its form, on a schedule, or
from an automation.

Every result is looked up first, so a schedule that fires again for the same weights computes nothing, and reports that.
The table of the results is published as an artifact, `evaluation-<run or model>`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import Task, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.annotations import opaque

from cairn.configs.schema.evaluation import Benchmark
from cairn.flows.evaluation.benchmarks import OwnBenchmark, benchmarks_of
from cairn.flows.evaluation.comparing import markdown
from cairn.flows.evaluation.evaluating import SEED, EvaluationResult, Watcher, evaluate_models
from cairn.flows.evaluation.models import BadPlace, ModelFolder, benchmarks_of_run, weights_to_evaluate
from cairn.flows.evaluation.regression import evaluated_run, regressions
from cairn.flows.orchestration.artifacts.pages import board_link
from cairn.flows.text import slug
from cairn.storage.store.store import Store


def evaluated(
    store: Store,
    benchmarks: Sequence[str],
    *,
    run: str | None,
    model: str | None,
    every: int | None,
    data: Sequence[str],
    sampling: Mapping[str, Any],
    engine: Mapping[str, Any],
    baseline: str | None,
    margin: float,
    fail_on_regression: bool,
    gate_on_regression: bool,
) -> State[None]:
    """Evaluate weights on benchmarks. Must be called in a flow run.

    Args:
        run: RUN, RUN@latest, RUN@ITER or RUN@A:B; None with `model`.
        model: a model folder in Hugging Face format; None with `run`.
        every: of a range of iterations, each N-th.
        data: files with rows: FILE for all benchmarks, NAME=FILE for one.
        sampling: options of `BenchmarkSampling` that override the benchmarks' own.
        engine: options of `EngineOptions` that override the run's, or the defaults.
        baseline: RUN@ITER, a folder or a digest whose results are in the store: worse scores raise an event.
        margin: by how much a score may be less than the baseline's.
        fail_on_regression: end as failed where a score is worse.
        gate_on_regression: let the run wait for approval before its next iteration where a score is worse.
    """
    logger = get_run_logger()
    if (run is None) == (model is None):
        raise BadPlace("pass either a run or a model folder")
    if gate_on_regression and baseline is None:
        raise BadPlace("gate_on_regression needs a baseline")
    gate = evaluated_run(run) if gate_on_regression else None
    own = None if run is None else benchmarks_of_run(store, run)
    changes = {"sampling": sampling} if sampling else {}
    requested = benchmarks_of(benchmarks, data=data, changes=changes, own=own)
    results: list[EvaluationResult] = []
    for one in weights_to_evaluate(store, run, model, every, engine, logger.info):
        results += _evaluate_model(store, one, requested)
    place = run or Path(str(model)).name
    create_markdown_artifact(
        key=f"evaluation-{slug(place) or 'model'}",
        markdown="\n\n".join([*board_link(run and evaluated_run(run)), markdown(results)]),
        description=f"{', '.join(benchmarks)} on {place}",
    )
    computed = sum(one.computed for one in results)
    message = f"{computed} of {len(results)} results computed, {len(results) - computed} found"
    worse = [] if baseline is None else regressions(store, results, baseline, margin, logger.warning, gate=gate)
    if worse and fail_on_regression:
        return Failed(message=f"{message}; worse than {baseline}: {'; '.join(worse)}")
    return Completed(message=message)


def _evaluate_model(
    store: Store, model: ModelFolder, benchmarks: Sequence[Benchmark | OwnBenchmark]
) -> list[EvaluationResult]:
    """Evaluate every benchmark on a model, as a task of the flow run."""
    logger = get_run_logger()

    def evaluate_model() -> Any:
        watcher = Watcher(logger.info)
        results = list(evaluate_models(store, [model], benchmarks, seed=SEED, watcher=watcher))
        for one in results:
            logger.info(f"{one.result.key.benchmark} on {one.model}: {one.source}")
        return opaque(results)

    run_name = f"{', '.join(one.name for one in benchmarks)} on {model.name}"
    task = Task(evaluate_model, name="evaluate model", cache_policy=NO_CACHE, persist_result=False)
    closed: Any = task.with_options(task_run_name=run_name)()
    results: list[EvaluationResult] = closed.unwrap()
    return results
