"""Prefect's side of a run: the flow run of a driver, and the flow run of each iteration below it.

    @flow(name="train", persist_result=False)
    def train(run: str, store: str):
        with driving(run, store) as tags:
            iterate = subflow(one_iteration, name="iteration", run_name="{run} {index:06d}", tags=tags)
            for index in range(first, total):
                iterate(run, index)

Facts about Prefect behind this module, measured on two cores with eight no-op steps an iteration
(`bench/orchestration.py`: about 40 ms as tasks of a running flow, 1200 as a plain subflow). `Child` documents how flow
runs are created.

- A flow run sends heartbeats from a thread, and waits up to a second for that thread at its end. Only the driver's flow
  run sends them; heartbeats of the iterations would cost more than everything else. `temporary_settings` validates
  every setting, 50 ms, so the driver enters it once.
- Prefect logs a line for each successful task run. It is filtered out: it would cost driver and server 6 ms of CPU time
  each.
- Tasks inherit the tags of their context, and a tagged task run requests a concurrency slot from the API, 2.5 ms,
  whether a limit exists or not. So flow runs are tagged here, and the context has no tags when steps run.
- Prefect converts parameters of a flow into JSON, including attributes of any object, and stores them: pass only names
  and numbers to a subflow, and let its body close over everything else. Parameters of a task are not stored.
- The graph has an edge from one step to another if the very object that the first returned is passed to the second,
  alone or inside a list. Results of an earlier iteration produce no edge.
- The graph of an iteration is `GET /flow_runs/<id>/graph-v2`. Task runs appear in it about a second late.

**Retry.** Prefect's UI offers Retry for flow runs of a deployment (`serve`, or a worker) in a final state: it sets
AwaitingRetry, and the runner or worker executes the same flow run again, in a new process with the same parameters. For
a flow run that a script created, the UI offers no Retry, because no process would execute it; use `cairn resume`. In
both cases each iteration that is entered again gets a new flow run, and the interrupted one stays as history.
"""

import hashlib
import inspect
import logging
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from uuid import UUID, uuid4

import prefect
from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.filters import FlowRunFilter, TaskRunFilter
from prefect.client.schemas.objects import FlowRun, FlowRunPolicy, StateType, TaskRun
from prefect.context import FlowRunContext, TagsContext
from prefect.flow_engine import FlowRunEngine
from prefect.futures import PrefectFuture
from prefect.logging.handlers import PrefectConsoleHandler
from prefect.runtime import task_run
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from prefect.states import Cancelled, Crashed, Pending, Running, State, to_state_create
from prefect.utilities.annotations import opaque

from cairn.flows.events import Stopping
from cairn.flows.orchestration.failed import without_traceback
from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import DurableStep

# Flow runs below the current one, created with two requests to Prefect's API and read with a third.
#
# Prefect's own engine sends seven requests before the body of a subflow begins: it queries the flow and the flow run,
# then sets the name and the first states one after the other. Here the flow is queried once, and the flow run is
# created with its name, in state Running. It is always new. Prefect's engine does everything else. With plain subflows
# an iteration takes 2.3 times as long to orchestrate (`bench/orchestration.py`: 0.11 s becomes 0.25 s at best).
#
# To ask of Prefect: let a flow create the run of a subflow with its name and first state in one request. Then this
# subclass of its private engine goes.


class Child:
    """A flow whose runs are created this way. Thread-safe."""

    def __init__(self, flow: Flow[..., Any], run_name: str) -> None:
        """`flow`: a flow without retries. `run_name`: a format string over its parameters."""
        self._flow, self._run_name = flow, run_name
        self._flow_id: UUID | None = None

    def __call__(self, parameters: dict[str, Any]) -> Any:
        """Run the flow within the body of another flow; return its result and raise its errors."""
        engine = _Engine(flow=self._flow, parameters=parameters)
        engine.child = self
        with engine.start():
            while engine.is_running():
                with engine.run_context():
                    engine.call_flow_fn()
        return engine.result()

    def create(self, client: SyncPrefectClient, parent: UUID, parameters: dict[str, Any]) -> FlowRun:
        """Create a flow run, and the task run that represents it in the graph of its parent."""
        if self._flow_id is None:
            self._flow_id = client.create_flow_from_name(self._flow.name)
        name, flow = self._run_name.format(**parameters), self._flow
        representative: Task[..., Any] = Task(name=flow.name, fn=flow.fn, version=flow.version)
        task_run = client.create_task_run(representative, parent, dynamic_key=uuid4().hex, name=name, state=Pending())
        wanted = FlowRunCreate(
            flow_id=self._flow_id,
            flow_version=flow.version,
            name=name,
            parameters=flow.serialize_parameters(parameters),
            tags=sorted(TagsContext.get().current_tags),
            parent_task_run_id=task_run.id,
            state=to_state_create(Running()),
            empirical_policy=FlowRunPolicy(retries=0, retry_delay=0),
        )
        response = client.request("POST", "/flow_runs/", json=wanted.model_dump(mode="json", exclude_unset=True))
        return FlowRun.model_validate(response.json())


class _Engine(FlowRunEngine[..., Any]):
    """Prefect's flow engine, with another way to create the flow run."""

    child: Child

    def create_flow_run(self, client: SyncPrefectClient) -> FlowRun:
        above = FlowRunContext.get()
        if above is None or above.flow_run is None:
            raise RuntimeError("there is no flow run outside of a flow's body")
        self._flow_run_name_set = True
        return self.child.create(client, above.flow_run.id, self.parameters or {})

    def begin_run(self) -> State[Any]:
        return self.state


# Steps as Prefect tasks: each is visible in its iteration's graph, with every retry.


class PrefectSteps:
    """Executes the steps of a run as tasks of the current flow run."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._tasks: dict[str, Task[..., Commit]] = {}

    def call(self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any) -> Commit:
        return self._task(step)(index, shard, *map(_opaque, args), **kwargs)

    def submit(
        self, step: DurableStep[Any], index: int, shard: str | None, *args: Any, **kwargs: Any
    ) -> PrefectFuture[Commit]:
        return self._task(step).submit(index, shard, *map(_opaque, args), **kwargs)

    def _task(self, step: DurableStep[Any]) -> "Task[..., Commit]":
        if step.name not in self._tasks:
            self._tasks[step.name] = step_task(self._run, step)
        return self._tasks[step.name]


def _opaque(argument: Any) -> Any:
    """Wrap an argument of a task: Prefect resolves it and draws an edge from it, but does not traverse it, which it
    would do twice for each task."""
    return [_opaque(item) for item in argument] if isinstance(argument, list) else opaque(argument)


def step_task(run: RunContext, step: DurableStep[Any]) -> "Task[..., Commit]":
    """Return a Prefect task of a durable step. Nothing is cached here: the ledger knows whether the step is committed.

    `cairn.tasks.durable.retries` decides which errors are retried, and after which wait.
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

    def is_retried(task: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
        return not run.stopping.is_set() and run.retries.was_granted(state.result(raise_on_failure=False))

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
        retry_condition_fn=is_retried,
    )


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CANCEL_INTERVAL = 2.0
"""Seconds between two queries to Prefect."""

_LOOKS_ALIVE = {"type": {"any_": [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]}}


@contextmanager
def driving(run: str, store_url: str, check_lease: Callable[[], None] = lambda: None) -> Iterator[frozenset[str]]:
    """Make the current flow run the driver of `run`; yield the tags for the flow runs below it.

    Must be entered while the caller holds the lease. Flow runs of earlier drivers that look alive are marked Crashed: a
    killed process cannot report its end, and its flow run would be shown as running for ever. `check_lease` raises
    LeaseLost if the flow runs belong to a later driver.
    """
    own, tags = current_flow_run(), run_tags(run, store_url)
    with get_client(sync_client=True) as client:
        client.update_flow_run(own.id, tags=tags.union(own.tags))
        crash_stale_runs(client, tags, besides=[own.id], check_lease=check_lease)
    task_runs = logging.getLogger("prefect.task_runs")
    for each in (_says_more_than_the_state, without_traceback):
        task_runs.addFilter(each)
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), TagsContext(current_tags=set()):
            yield tags
    finally:
        for each in (_says_more_than_the_state, without_traceback):
            task_runs.removeFilter(each)


def _says_more_than_the_state(record: logging.LogRecord) -> bool:
    """Return False for the line that Prefect logs for each successful task run."""
    return not record.getMessage().startswith("Finished in state Completed")


def subflow(
    body: Callable[Parameters, Result],
    *,
    name: str,
    run_name: str,
    tags: Collection[str],
    ends_in: Callable[[Exception], State[Any] | None] = lambda error: None,
) -> Callable[Parameters, Result]:
    """Make every call of `body` a flow run with `tags`, named by `run_name`, a format string over its parameters.

    The parameters are stored with the flow run: pass few, and only JSON values. Prefect does not traverse the return
    value. Task runs in it get none of the tags. `ends_in` returns the final state of a flow run for an error, where it
    is not to be Failed. The caller gets the error in any case.
    """

    @wraps(body)
    def untagged(*args: Parameters.args, **kwargs: Parameters.kwargs) -> opaque | State[Any]:
        with TagsContext(current_tags=set()):
            try:
                return opaque(body(*args, **kwargs))
            except Exception as error:
                state = ends_in(error)
                if state is None:
                    raise
                state.data = error
                return state

    flow = prefect.Flow(untagged, name=name, persist_result=False, validate_parameters=False)
    child, signature = Child(flow, run_name), inspect.signature(body)

    @wraps(body)
    def tagged(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with prefect.tags(*tags):
            wrapped = child(signature.bind(*args, **kwargs).arguments)
        result: Result = wrapped.unwrap()
        return result

    return tagged


def run_tags(run: str, store_url: str) -> frozenset[str]:
    """Return the tags of the flow runs of `run`. On a shared server, a run of the same name in another store has
    others."""
    place = store_url if "://" in store_url else f"{socket.gethostname()}:{Path(store_url).resolve()}"
    digest = hashlib.sha256(f"{place.rstrip('/')}/{run}".encode()).hexdigest()
    return frozenset(("cairn", f"run:{run}", f"ledger:{digest[:12]}"))


def current_flow_run() -> FlowRun:
    """Return the flow run of the current flow's body."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("there is no flow run outside of a flow's body")
    return context.flow_run


def wait_for_cancel(flow_run: UUID, over: threading.Event) -> bool:
    """Wait, and return whether a person cancels the flow run before the event is set.

    Needed where no runner or worker has started the flow run: then Prefect cannot notify its process.
    """
    with get_client(sync_client=True) as client:
        while not over.wait(CANCEL_INTERVAL):
            with suppress(Exception):  # the server may come back
                state = client.read_flow_run(flow_run).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    return True
    return False


def confirm_cancel(flow_run: UUID) -> None:
    """Mark a cancelled flow run as Cancelled after it has ended; its engine would mark it as crashed."""
    state: State[None] = Cancelled(
        message="The driver shut down cleanly; `cairn resume` continues from the last commit"
    )
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def crash_stale_runs(
    client: SyncPrefectClient, tags: Collection[str], *, besides: Collection[UUID], check_lease: Callable[[], None]
) -> list[FlowRun]:
    """Mark flow runs that have all of `tags` and look alive as Crashed, with their task runs; return the flow runs.

    Flow runs in state Cancelling are marked Cancelled. `besides`: flow runs of live drivers, which are skipped. A task
    run that represents a subflow follows the subflow's state. `check_lease` is called after the query, and raises if
    the caller may not mark them.
    """
    stale = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"tags": {"all_": sorted(tags)}, "state": _LOOKS_ALIVE, "id": {"not_any_": list(besides)}}
        )
    )
    if not stale:
        return []
    _crash(client, stale, check_lease)
    return stale


def crash_with_all_below(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """Mark a flow run whose process is gone, and the flow runs that it created, in the same way."""
    wanted = {"parent_flow_run_id": {"any_": [flow_run.id]}, "state": _LOOKS_ALIVE}
    below = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted))
    _crash(client, [*below, flow_run], lambda: None)


def _crash(client: SyncPrefectClient, stale: list[FlowRun], check_lease: Callable[[], None]) -> None:
    crashed: State[None] = Crashed(
        message="The driver's process is gone; another driver continues from the last commit."
    )
    cancelled: State[None] = Cancelled(message="The driver's process is gone; Retry continues from the last commit.")
    unfinished = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run.id for flow_run in stale]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": _LOOKS_ALIVE}),
    )
    check_lease()
    for run in unfinished:
        client.set_task_run_state(run.id, crashed.fresh_copy(), force=True)
    for flow_run in stale:
        cancelling = flow_run.state is not None and flow_run.state.is_cancelling()
        client.set_flow_run_state(flow_run.id, (cancelled if cancelling else crashed).fresh_copy(), force=True)


def silence_console() -> None:
    """Keep Prefect's log records off this process's terminal; the API and the UI still get them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL + 1)
