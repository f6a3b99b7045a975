"""Watching for killed drivers: their flow runs are marked Crashed, and restarted where their form says so.

A killed process cannot report its end, and Prefect shows it as running for ever. The run's lease tells whether a driver
is alive. So every few seconds:

| flow run | its run's newest lease | action |
|---|---|---|
| Running, since before the lease was taken | over | marked Crashed, with its iterations and steps |
| Cancelling | over | marked Cancelled, and its iterations and steps Crashed |
| Crashed, not by Cancel, `restarts` left | over, its driver killed or preempted | scheduled again, like a Retry |
| Paused, Suspended, Scheduled, Cancelled, Failed | any | none |

Flow runs of deployments also record which process executes them. So flow runs without a lease are marked too, and
those of drivers that were killed before they had the lease are restarted. A flow run is scheduled again if the
`cairn up` that claimed it was killed before the flow run began.

The lease decides, and a restarted driver must acquire it, so two watching processes do no harm. For a driver on another
machine the lease's clock decides. A wrong clock can affect the displayed state, but never who may commit.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.states import AwaitingRetry, Scheduled, State

from cairn.flows.orchestration.flow_runs import crash_stale_runs, crash_with_all_below, run_tags
from cairn.storage.ledger.leases import Holder, LeaseState, Outcome, newest_lease
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged, StoreError

# Each flow run records the process that executes it, because not every flow run has a run's lease.


PROCESS, RECORDED_AT = "cairn.process", "cairn.said_at"
"""Labels of the flow run: the process as JSON, and the time of that record in Unix seconds."""


def record_process(flow_run: UUID) -> None:
    """Record this process as the one that executes the flow run. Must be called before anything else."""
    labels: dict[str, Any] = {PROCESS: Holder.this_process().model_dump_json(), RECORDED_AT: time.time()}
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run, labels)


def recorded_at_if_killed(client: SyncPrefectClient, flow_run: FlowRun) -> float | None:
    """Return when the process of the flow run recorded itself, in Unix seconds, if that process is gone.

    Returns None where it is alive, where this machine cannot know, and where a newer attempt has not recorded its
    process yet.
    """
    process, at = flow_run.labels.get(PROCESS), flow_run.labels.get(RECORDED_AT)
    if not isinstance(process, str) or not isinstance(at, float) or not Holder.model_validate_json(process).is_gone():
        return None
    tries = [state.timestamp.timestamp() for state in client.read_flow_run_states(flow_run.id) if state.is_pending()]
    return at if at > max(tries, default=0.0) else None


INTERVAL = 5.0
"""Seconds between two checks."""

START_TIMEOUT = 180.0
"""Seconds that a process has to begin a flow run that it has claimed."""

REPORT_TIMEOUT = 60.0
"""Seconds that a driver may take to report to Prefect after it has released its run."""

RESTARTED = "Started again by itself"
"""Beginning of the message of the state that a restart sets."""

_log = logging.getLogger("prefect.cairn.watching")


class _LeaseTaken(Exception):
    """Another driver has acquired the run meanwhile."""


def watch(over: threading.Event, interval: float = INTERVAL) -> None:
    """Check every `interval` seconds until the event is set."""
    with get_client(sync_client=True) as client:
        while not over.wait(interval):
            try:
                check_once(client)
            except Exception as error:  # the server or a store may come back, and the next check sees the rest
                _log.warning("cannot check drivers: %s", error)


def check_once(client: SyncPrefectClient) -> None:
    """Check once: mark flow runs whose driver is gone, and restart those with restarts left."""
    running = _drivers(client, [StateType.RUNNING, StateType.CANCELLING])
    lost = {flow_run.id for flow_run in running if _is_lost(flow_run)}
    for flow_run in running:
        if flow_run.id in lost:
            others = [other.id for other in running if other.id not in lost]
            _mark(client, flow_run, others)
    for flow_run in _deployed(client, [StateType.RUNNING, StateType.CANCELLING]):
        if recorded_at_if_killed(client, flow_run) is not None:
            crash_with_all_below(client, flow_run)
            _log.warning("the process of flow run %s is gone; the flow run has ended", flow_run.name)
    for flow_run in _deployed(client, [StateType.PENDING]):
        if flow_run.work_pool_name is None and flow_run.state and _age(flow_run.state) > START_TIMEOUT:
            scheduled: State[None] = Scheduled(message="The process that claimed it did not start it")
            client.set_flow_run_state(flow_run.id, scheduled, force=True)
            _log.warning("flow run %s was claimed but not started; it is scheduled again", flow_run.name)
    for flow_run in _deployed(client, [StateType.CRASHED]):
        _restart(client, flow_run)


def _drivers(client: SyncPrefectClient, types: list[StateType]) -> list[FlowRun]:
    """Return flow runs of drivers that have had their run's lease, newest first."""
    return [flow_run for flow_run in _flow_runs(client, types) if _place(flow_run) is not None]


def _deployed(client: SyncPrefectClient, types: list[StateType]) -> list[FlowRun]:
    """Return flow runs of deployments, those of drivers and others."""
    return [flow_run for flow_run in _flow_runs(client, types) if flow_run.deployment_id is not None]


def _age(state: "State[Any]") -> float:
    return time.time() - state.timestamp.timestamp()


def _flow_runs(client: SyncPrefectClient, types: list[StateType]) -> list[FlowRun]:
    wanted = {"tags": {"all_": ["cairn"]}, "state": {"type": {"any_": types}}, "parent_task_run_id": {"is_null_": True}}
    return client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted), sort=FlowRunSort.START_TIME_DESC)


def _place(flow_run: FlowRun) -> tuple[str, str] | None:
    """Return store and run; None where the flow run has not had the lease, or its tags belong to another store."""
    run = next((tag.removeprefix("run:") for tag in flow_run.tags if tag.startswith("run:")), None)
    store = flow_run.parameters.get("store") or os.environ.get("CAIRN_STORE") or "."
    if run is None or not run_tags(run, store) <= set(flow_run.tags):
        return None
    return store, run


def _lease(flow_run: FlowRun) -> LeaseState | None:
    store, run = _place(flow_run) or ("", "")
    try:
        return newest_lease(open_store(store), run)
    except (StoreError, Damaged) as error:
        _log.warning("cannot determine whether the driver of %s is alive: %s", run, error)
        return None


def _is_lost(flow_run: FlowRun) -> bool:
    lease = _lease(flow_run)
    if lease is None or flow_run.state is None or not lease.looks_over():
        return False
    since = flow_run.state.timestamp if flow_run.state.is_running() else flow_run.start_time
    if since is None or since.timestamp() > lease.acquired_at:
        return False  # it has not acquired the lease yet
    return lease.outcome is None or time.time() - lease.renewed_at > REPORT_TIMEOUT


def _mark(client: SyncPrefectClient, flow_run: FlowRun, others: list[UUID]) -> None:
    place = _place(flow_run)
    assert place is not None
    store, run = place

    def require_lost() -> None:
        if not _is_lost(client.read_flow_run(flow_run.id)):
            raise _LeaseTaken

    try:
        crash_stale_runs(client, run_tags(run, store), besides=others, check_lease=require_lost)
    except _LeaseTaken:
        return
    cancelled = flow_run.state is not None and flow_run.state.is_cancelling()
    _log.warning("the driver of %s is gone; its flow run is marked %s", run, "Cancelled" if cancelled else "Crashed")


def _restart(client: SyncPrefectClient, flow_run: FlowRun) -> None:
    limit = flow_run.parameters.get("restarts") or 0
    if not limit or not (_lost_its_lease(flow_run) or _is_killed_before_its_lease(client, flow_run)):
        return
    states = sorted(client.read_flow_run_states(flow_run.id), key=lambda state: state.timestamp)
    before = sum((state.message or "").startswith(RESTARTED) for state in states)
    if before >= limit or _was_cancelled(states):
        return
    message = f"{RESTARTED}, {before + 1} of {limit}: the driver's process was killed"
    client.set_flow_run_state(flow_run.id, AwaitingRetry(message=message), force=True)
    _log.warning("%s is started again, %d of %d", flow_run.name, before + 1, limit)


def _lost_its_lease(flow_run: FlowRun) -> bool:
    lease = _lease(flow_run) if _place(flow_run) else None
    return lease is not None and lease.looks_over() and lease.outcome in (None, Outcome.PREEMPTED)


def _is_killed_before_its_lease(client: SyncPrefectClient, flow_run: FlowRun) -> bool:
    recorded_at = recorded_at_if_killed(client, flow_run)
    if recorded_at is None or _place(flow_run) is None:
        return recorded_at is not None
    lease = _lease(flow_run)
    return lease is not None and lease.acquired_at < recorded_at


def _was_cancelled(states: "Sequence[State[Any]]") -> bool:
    """Whether a person cancelled the flow run since it was last started. Cancel sends SIGTERM, and its driver may have
    crashed by it."""
    last = next((state for state in reversed(states) if state.is_running() or state.is_cancelling()), None)
    return last is not None and last.is_cancelling()
