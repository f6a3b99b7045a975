"""Steps as Prefect tasks: each visible in its iteration's graph, retried where a new try can help."""

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.runtime import task_run

from configs.schema.operations import RetryConfig
from engines.errors import ClusterLost, EngineError
from storage.commits import Commit
from storage.errors import StoreError, StoreRefused
from tasks.context import RunContext
from tasks.step import DurableStep


class PrefectSteps:
    """Executes the steps of a run as tasks of the flow run it is called in."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._tasks: dict[str, Task[..., Commit]] = {}

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        return self._task(step)(index, shard, *args, **kwargs)

    def submit(
        self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any
    ) -> PrefectFuture[Commit]:
        return self._task(step).submit(index, shard, *args, **kwargs)

    def _task(self, step: DurableStep[Any]) -> "Task[..., Commit]":
        if step.name not in self._tasks:
            self._tasks[step.name] = step_task(self._run, step)
        return self._tasks[step.name]


def step_task(run: RunContext, step: DurableStep[Any]) -> "Task[..., Commit]":
    """A Prefect task of a durable step. Whether it has happened is for the ledger to say: nothing is cached here."""

    def execute(index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        return step(run, index, shard, *args, **kwargs)

    def run_name() -> str:
        shard = task_run.parameters["shard"]
        return str(step.name) if shard is None else f"{step.name} {shard}"

    policy = run.config.retry
    return Task(
        execute,
        name=str(step.name),
        task_run_name=run_name,
        description=step.body.__doc__,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=policy.retries,
        retry_delay_seconds=retry_delays(policy),
        retry_condition_fn=can_be_mended,
    )


def retry_delays(policy: RetryConfig) -> list[float]:
    """Seconds before each new try."""
    return [policy.retry_delay_seconds * 2**attempt for attempt in range(policy.retries)]


def can_be_mended(task: Task[..., Any], run: TaskRun, state: State[Any]) -> bool:
    """Whether a failed step is worth a new try: an engine or the store failed, not the run itself."""
    error = state.result(raise_on_failure=False)
    return isinstance(error, EngineError | StoreError) and not isinstance(error, StoreRefused | ClusterLost)
