"""Steps as Prefect tasks: each visible in its iteration's graph, with every new try."""

from typing import Any

from prefect import Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.futures import PrefectFuture
from prefect.runtime import task_run
from prefect.utilities.annotations import opaque

from cairn.storage.commits import Commit
from cairn.tasks.context import RunContext
from cairn.tasks.events import Message
from cairn.tasks.step import DurableStep


class Stopping(Exception):
    """The driver is about to end, and begins no step."""


class PrefectSteps:
    """Executes the steps of a run as tasks of the flow run it is called in."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._tasks: dict[str, Task[..., Commit]] = {}

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        return self._task(step)(index, shard, *map(_closed, args), **kwargs)

    def submit(
        self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any
    ) -> PrefectFuture[Commit]:
        return self._task(step).submit(index, shard, *map(_closed, args), **kwargs)

    def _task(self, step: DurableStep[Any]) -> "Task[..., Commit]":
        if step.name not in self._tasks:
            self._tasks[step.name] = step_task(self._run, step)
        return self._tasks[step.name]


def _closed(argument: Any) -> Any:
    """An argument of a task, for Prefect to resolve and to draw an edge from, but not to walk through. It would do so
    twice a task."""
    return [_closed(item) for item in argument] if isinstance(argument, list) else opaque(argument)


def step_task(run: RunContext, step: DurableStep[Any]) -> "Task[..., Commit]":
    """A Prefect task of a durable step. Whether it has happened is for the ledger to say: nothing is cached here.

    Which errors are worth a new try, and after which wait, is for `cairn.tasks.retries` to say.
    """

    def execute(index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        place = (index, step.name, shard)
        if run.stopping.wait(run.retries.next_wait(place)):
            raise Stopping(f"the driver ends: {step.name} does not begin")
        try:
            return step(run, index, shard, *args, **kwargs)
        except Exception as error:
            if run.retries.ask(place, error) and not run.stopping.is_set():
                run.emit(Message(f"Iteration {index}: {run_name(shard)} is tried again: {error}", "warning"))
            raise

    def is_tried_again(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
        return not run.stopping.is_set() and run.retries.granted(state.result(raise_on_failure=False))

    def run_name(shard: str | None) -> str:
        return str(step.name) if shard is None else f"{step.name} {shard}"

    return Task(
        execute,
        name=str(step.name),
        task_run_name=lambda: run_name(task_run.parameters["shard"]),
        description=step.body.__doc__,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=run.retries.most(step.name),
        retry_condition_fn=is_tried_again,
    )
