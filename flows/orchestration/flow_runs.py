"""Prefect's side of a run: the flow run of a driver, and the flow run of each iteration below it.

    @flow(name="train", persist_result=False)
    def train(run: str, store: str):
        with driving(run, store) as tags:
            iterate = subflow(one_iteration, name="iteration", run_name="{run} {index:06d}", tags=tags)
            for index in range(first, total):
                iterate(run, index)

What this module knows of Prefect, measured on two cores with eight no-op steps an iteration (`bench/orchestration.py`:
about 40 ms as tasks of a running flow, 1200 as a plain subflow), besides what `child_engine` knows of making flow runs:

- A flow run sends heartbeats from a thread that it waits up to a second for at its end. The driver's flow run sends
  them; those of the iterations would cost more than all else. `temporary_settings` validates every setting, 50 ms, so
  the driver enters it once.
- A line in the log of each task run that succeeds, that it has, would cost driver and server 6 ms of CPU time each.
- Tasks take the tags of the context they run in, and a tagged task run asks the API for a concurrency slot, 2.5 ms,
  whether a limit exists or not. So flow runs are tagged here, and the context is empty when steps run.
- Parameters of a flow are turned into JSON by walking into them, attributes of any object included, and stored: give a
  subflow names and numbers, and let its body close over everything else. Parameters of a task are not stored.
- A graph has an edge from one step to another where the very object that the first returned is passed to the second,
  alone or inside a list. What an earlier iteration returned is no edge.
- The graph of an iteration is `GET /flow_runs/<id>/graph-v2`. Task runs reach it about a second late.

**Retry.** Prefect's interface offers Retry for flow runs of a deployment (`serve`, or a worker) that are in a final
state: it sets AwaitingRetry, and the runner or worker executes the same flow run again, in a new process with the same
parameters. For a flow run that a script made it offers none, since nobody would pick it up: there, `cairn resume` goes
on. Either way each iteration that is entered again gets a flow run of its own and the broken one stays as history.
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
from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import DurableStep

# A flow run below the current one, made in two requests of Prefect's API and read in a third.
#
# Prefect's own engine sends seven before the body of a subflow begins: it asks whether the flow is there, and whether
# the flow run, which gets its name and its first states one after the other. Here the flow is asked for once, and the
# flow run is made with its name, running. It is always a new one. All else is left to Prefect's engine.


class Child:
    """A flow whose runs are made so. Threads may share it."""

    def __init__(self, flow: Flow[..., Any], run_name: str) -> None:
        """`flow`: without retries. `run_name`: a format string over its parameters."""
        self._flow, self._run_name = flow, run_name
        self._flow_id: UUID | None = None

    def __call__(self, parameters: dict[str, Any]) -> Any:
        """Run it within the body of another flow; returns what it returns. Raises what it raises."""
        engine = _Engine(flow=self._flow, parameters=parameters)
        engine.child = self
        with engine.start():
            while engine.is_running():
                with engine.run_context():
                    engine.call_flow_fn()
        return engine.result()

    def create(self, client: SyncPrefectClient, parent: UUID, parameters: dict[str, Any]) -> FlowRun:
        """Make a flow run, with the task run that stands for it in the graph of its parent."""
        if self._flow_id is None:
            self._flow_id = client.create_flow_from_name(self._flow.name)
        name, flow = self._run_name.format(**parameters), self._flow
        stands_for_it: Task[..., Any] = Task(name=flow.name, fn=flow.fn, version=flow.version)
        task_run = client.create_task_run(stands_for_it, parent, dynamic_key=uuid4().hex, name=name, state=Pending())
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
        made = client.request("POST", "/flow_runs/", json=wanted.model_dump(mode="json", exclude_unset=True))
        return FlowRun.model_validate(made.json())


class _Engine(FlowRunEngine[..., Any]):
    """Prefect's, but for how its flow run comes about."""

    child: Child

    def create_flow_run(self, client: SyncPrefectClient) -> FlowRun:
        above = FlowRunContext.get()
        if above is None or above.flow_run is None:
            raise RuntimeError("there is no flow run outside of a flow's body")
        self._flow_run_name_set = True
        return self.child.create(client, above.flow_run.id, self.parameters or {})

    def begin_run(self) -> State[Any]:
        return self.state


# Steps as Prefect tasks: each visible in its iteration's graph, with every new try.


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

    Which errors are worth a new try, and after which wait, is for `cairn.tasks.durable.retries` to say.
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


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CANCEL_INTERVAL = 2.0
"""Seconds between two questions to Prefect."""

_LOOKS_ALIVE = {"type": {"any_": [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]}}


@contextmanager
def driving(run: str, store_url: str, require_held: Callable[[], None] = lambda: None) -> Iterator[frozenset[str]]:
    """Make the current flow run the driver of `run`; yields the tags for the flow runs below it.

    To be entered with the lease in hand: what still looks alive of earlier drivers is marked Crashed, since a process
    that was killed cannot say so itself and would be shown as running for ever. `require_held` raises LeaseLost if what
    looks alive is a later driver.
    """
    own, tags = current_flow_run(), run_tags(run, store_url)
    with get_client(sync_client=True) as client:
        client.update_flow_run(own.id, tags=tags.union(own.tags))
        crash_stale_runs(client, tags, besides=[own.id], require_held=require_held)
    task_runs = logging.getLogger("prefect.task_runs")
    task_runs.addFilter(_says_more_than_the_state)
    try:
        with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}), TagsContext(current_tags=set()):
            yield tags
    finally:
        task_runs.removeFilter(_says_more_than_the_state)


def _says_more_than_the_state(record: logging.LogRecord) -> bool:
    """False for the line that Prefect logs of each task run that succeeds."""
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

    The parameters are stored with the flow run: JSON values, and few. What it returns Prefect does not walk through.
    Task runs in it get none of the tags. `ends_in`: the final state of a flow run that an error ends, where it is not
    to be Failed. Who called gets the error either way.
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
            made = child(signature.bind(*args, **kwargs).arguments)
        result: Result = made.unwrap()
        return result

    return tagged


def run_tags(run: str, store_url: str) -> frozenset[str]:
    """Tags of the flow runs of `run`. A run of the same name in another store, on a shared server, has others."""
    place = store_url if "://" in store_url else f"{socket.gethostname()}:{Path(store_url).resolve()}"
    digest = hashlib.sha256(f"{place.rstrip('/')}/{run}".encode()).hexdigest()
    return frozenset(("cairn", f"run:{run}", f"ledger:{digest[:12]}"))


def current_flow_run() -> FlowRun:
    """For the body of a flow: its flow run."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("there is no flow run outside of a flow's body")
    return context.flow_run


def wait_for_cancel(flow_run: UUID, over: threading.Event) -> bool:
    """Whether somebody cancels the flow run before the event is set. To be asked where no runner or worker has started
    it: Prefect has nobody then who could tell its process."""
    with get_client(sync_client=True) as client:
        while not over.wait(CANCEL_INTERVAL):
            with suppress(Exception):  # the server may come back
                state = client.read_flow_run(flow_run).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    return True
    return False


def confirm_cancel(flow_run: UUID) -> None:
    """Mark a flow run that has ended because somebody cancelled it so; its engine takes that for a crash."""
    state: State[None] = Cancelled(message="The driver has ended in order; `cairn resume` goes on from the last commit")
    with suppress(Exception), get_client(sync_client=True) as client:
        client.set_flow_run_state(flow_run, state, force=True)


def crash_stale_runs(
    client: SyncPrefectClient, tags: Collection[str], *, besides: Collection[UUID], require_held: Callable[[], None]
) -> list[FlowRun]:
    """Mark flow runs that have all of `tags` and look alive as Crashed, and the task runs in them; return them. One
    that a person was cancelling is Cancelled.

    `besides`: flow runs of drivers that live. A task run that stands for a subflow follows the subflow's state.
    `require_held` is called when they are known, and raises if they are not for the caller to judge.
    """
    stale = client.read_flow_runs(
        flow_run_filter=FlowRunFilter.model_validate(
            {"tags": {"all_": sorted(tags)}, "state": _LOOKS_ALIVE, "id": {"not_any_": list(besides)}}
        )
    )
    if not stale:
        return []
    _crash(client, stale, require_held)
    return stale


def crash_with_all_below(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    """The same for a flow run whose process is gone, and those that it made."""
    wanted = {"parent_flow_run_id": {"any_": [flow_run.id]}, "state": _LOOKS_ALIVE}
    below = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted))
    _crash(client, [*below, flow_run], lambda: None)


def _crash(client: SyncPrefectClient, stale: list[FlowRun], require_held: Callable[[], None]) -> None:
    crashed: State[None] = Crashed(message="The driver's process is gone; another driver goes on from the last commit.")
    cancelled: State[None] = Cancelled(message="The driver's process is gone; Retry goes on from the last commit.")
    unfinished = client.read_task_runs(
        flow_run_filter=FlowRunFilter.model_validate({"id": {"any_": [flow_run.id for flow_run in stale]}}),
        task_run_filter=TaskRunFilter.model_validate({"state": _LOOKS_ALIVE}),
    )
    require_held()
    for run in unfinished:
        client.set_task_run_state(run.id, crashed.fresh_copy(), force=True)
    for flow_run in stale:
        cancelling = flow_run.state is not None and flow_run.state.is_cancelling()
        client.set_flow_run_state(flow_run.id, (cancelled if cancelling else crashed).fresh_copy(), force=True)


def silence_console() -> None:
    """Keep Prefect's log records off this process's terminal; the API and the interface still get them."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, PrefectConsoleHandler):
            handler.setLevel(logging.CRITICAL + 1)
