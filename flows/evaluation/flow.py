"""`evaluate` as a Prefect flow: by hand from its form, on a schedule, or from an automation.

A flow run looks every result up first, so a schedule that fires again over the same weights computes nothing, and says
so. It leaves an artifact with the table of its results, `evaluation-<what was evaluated>`.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from prefect import Task, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from prefect.utilities.annotations import opaque

from cairn.configs.schema.benchmark import Benchmark
from cairn.flows.evaluation.asking import benchmarks_of
from cairn.flows.evaluation.evaluating import Found, Watcher, evaluate_models
from cairn.flows.evaluation.models import BadPlace, Evaluable, benchmarks_of_run, weights_to_evaluate
from cairn.flows.evaluation.own import OwnBenchmark
from cairn.flows.evaluation.questions import SEED
from cairn.flows.evaluation.regression import regressions
from cairn.flows.evaluation.tables import markdown
from cairn.storage.store import Store, open_store


@flow(name="evaluate", persist_result=False)
def evaluate(
    benchmarks: list[str],
    run: str | None = None,
    model: str | None = None,
    store: str = ".",
    every: int | None = None,
    n: int | None = None,
    data: list[str] | None = None,
    changes: dict[str, dict[str, Any]] | None = None,
    engine: Literal["transformers", "sglang"] | None = None,
    dtype: Literal["float32", "bfloat16"] | None = None,
    num_gpus: float | None = None,
    num_threads: int | None = None,
    seed: int = SEED,
    baseline: str | None = None,
    margin: float = 0.0,
    fail_on_regression: bool = False,
) -> State[None]:
    """Find out what weights get at benchmarks, and keep the results in the store; what is there is not computed again.

    Args:
        benchmarks: Names of benchmarks, such as gsm8k, or YAML files.
        run: RUN, RUN@latest, RUN@ITER or RUN@A:B; a run that trains meanwhile is not disturbed.
        model: A model folder in Hugging Face format, in the place of a run.
        store: Root of the ledger: a folder or s3://bucket/prefix.
        every: Of a range of iterations, each N-th.
        n: Responses to each question; by default the benchmark's own number.
        data: Files with rows: FILE for all benchmarks, NAME=FILE for one.
        changes: Other options of the benchmarks, by section.
        engine: Kind of engine; by default that of the run, or transformers.
        dtype: Number format; by default that of the run, or float32.
        num_gpus: GPUs of the engine; 0 computes on the CPU.
        num_threads: CPU threads of the engine.
        seed: Of all draws.
        baseline: RUN@ITER, a folder or a digest whose results are in the store: worse ones raise an event.
        margin: By how much a score may be less than the baseline's.
        fail_on_regression: End as failed where a score is worse than the baseline's.
    """
    logger = get_run_logger()
    if (run is None) == (model is None):
        raise BadPlace("give either a run or a model folder")
    opened = open_store(store)
    own = None if run is None else benchmarks_of_run(opened, run)
    asked = benchmarks_of(benchmarks, n=n, data=data or (), changes=changes, own=own)
    given = {"engine": engine, "dtype": dtype, "num_gpus": num_gpus, "num_threads": num_threads}
    options = {name: value for name, value in given.items() if value is not None}
    found: list[Found] = []
    for one in weights_to_evaluate(opened, run, model, every, options, logger.info):
        found += _of_model(opened, one, asked, seed)
    place = run or Path(str(model)).name
    create_markdown_artifact(
        key=f"evaluation-{_slug(place)}", markdown=markdown(found), description=f"{', '.join(benchmarks)} on {place}"
    )
    computed = sum(one.computed for one in found)
    message = f"{computed} of {len(found)} results computed, {len(found) - computed} found"
    worse = [] if baseline is None else regressions(opened, found, baseline, margin, logger.warning)
    if worse and fail_on_regression:
        return Failed(message=f"{message}; worse than {baseline}: {'; '.join(worse)}")
    return Completed(message=message)


def _of_model(store: Store, model: Evaluable, benchmarks: Sequence[Benchmark | OwnBenchmark], seed: int) -> list[Found]:
    """Every benchmark on a model, as a task of the flow run."""
    logger = get_run_logger()

    def evaluated() -> Any:
        watcher = Watcher(logger.info)
        found = list(evaluate_models(store, [model], benchmarks, seed=seed, watcher=watcher))
        for one in found:
            verdict = "computed" if one.computed else "found, nothing computed"
            logger.info(f"{one.result.key.benchmark} on {one.model}: {verdict}")
        return opaque(found)

    run_name = f"{', '.join(one.name for one in benchmarks)} on {model.name}"
    run = Task(evaluated, name="evaluate model", task_run_name=run_name, cache_policy=NO_CACHE, persist_result=False)
    closed: Any = run()
    found: list[Found] = closed.unwrap()
    return found


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "model"
