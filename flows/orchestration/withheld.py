"""States in Prefect of a run that waits for a person's approval, or was rejected (`cairn.flows.driver.approval`).

| the run | state of its driver's flow run | executed again by | state of the iteration's flow run |
|---|---|---|---|
| waits, and its driver with it | AwaitingApproval, of type Running | | the same |
| waits, and its driver has ended | AwaitingApproval, of type Paused | Resume | AwaitingApproval, of type Cancelled |
| was rejected | Rejected, of type Cancelled | Retry | the same |

The message of each state explains how to decide, and what happens then. None of these flow runs restarts automatically.
A flow run without a deployment cannot be executed again, and is cancelled instead of paused.

The event `cairn.approval.requested` is for automations. If Prefect is unavailable, the ledger has the same information.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.events import emit_event
from prefect.exceptions import Pause
from prefect.states import Cancelled, Failed, Paused, Running, State

from cairn.flows.driver.approval import AwaitingApproval, Rejected, Withheld
from cairn.flows.events import Stopping
from cairn.flows.orchestration.failed import is_expected
from cairn.flows.orchestration.flow_runs import current_flow_run, run_tags
from cairn.storage.ledger.decisions import GateStatus

AWAITING_APPROVAL = "AwaitingApproval"
REJECTED = "Rejected"
"""Names of states."""

REQUESTED = "cairn.approval.requested"
"""Name of the event."""

RESUMED_ELSEWHERE = "A later driver has continued the run"


@contextmanager
def waiting(driver: FlowRun, run: str, gate: GateStatus, sentence: str) -> Iterator[None]:
    """Show in Prefect, while the block runs, that a run and its driver wait at a gate."""
    shown = {driver.id, current_flow_run().id}
    _show(shown, Running(name=AWAITING_APPROVAL, message=sentence))
    emit_requested(driver, run, gate)
    try:
        yield
    finally:
        _show(shown, Running())


def emit_requested(driver: FlowRun, run: str, gate: GateStatus) -> None:
    """Emit the event that requests a decision."""
    with suppress(Exception):
        emit_event(
            REQUESTED,
            resource={"prefect.resource.id": f"cairn.run.{run}", "prefect.resource.name": run},
            related=[
                {"prefect.resource.id": f"prefect.flow-run.{driver.id}", "prefect.resource.role": "flow-run"},
            ],
            payload={
                "run": run,
                "iteration": gate.iteration,
                "why": gate.gate.why if gate.gate else None,
                "approve": f"cairn approve {run}@{gate.iteration}",
                "reject": f"cairn reject {run}@{gate.iteration}",
            },
        )


def end_of_iteration(error: Exception) -> "State[Any] | None":
    """Return the final state of an iteration that may not begin, does not begin because its driver ends, or failed in
    an expected way. For `subflow`."""
    if isinstance(error, Withheld):
        return Cancelled(name=_name(error), message=str(error))
    if isinstance(error, Stopping):
        return Cancelled(message=str(error))
    return Failed(message=str(error)) if is_expected(error) else None


def end_of_driver(error: Withheld, run: str, store_url: str) -> "State[Any]":
    """Return the state that the body of the driver's current flow run must return; its caller then gets the error.
    Raises Pause, for Prefect's engine, where the flow run can be executed again."""
    own = current_flow_run()
    if isinstance(error, AwaitingApproval):
        emit_requested(own, run, error.gate)
        if own.deployment_id is not None and (paused := _pause(own, str(error), run_tags(run, store_url))) is not None:
            raise Pause(state=paused)
    return Cancelled(name=_name(error), message=str(error), data=error)


def end_paused(driver: FlowRun, tags: Collection[str], check_lease: Callable[[], None]) -> None:
    """Cancel the run's flow runs that wait for a person, except the driver's own. The driver holds the lease, so none
    of them needs to be resumed. `check_lease` raises LeaseLost if they belong to a later driver."""
    waits = FlowRunFilter.model_validate(
        {
            "tags": {"all_": sorted(tags)},
            "state": {"type": {"any_": [StateType.PAUSED]}, "name": {"any_": [AWAITING_APPROVAL]}},
            "id": {"not_any_": [driver.id]},
        }
    )
    with get_client(sync_client=True) as client:
        waiting = client.read_flow_runs(flow_run_filter=waits)
    if waiting:
        check_lease()
        _show({flow_run.id for flow_run in waiting}, Cancelled(message=RESUMED_ELSEWHERE))


def _pause(own: FlowRun, sentence: str, tags: Collection[str]) -> "State[Any] | None":
    """Pause a flow run and return its new state; None where Prefect's server does not pause it."""
    paused: State[Any] = Paused(name=AWAITING_APPROVAL, message=sentence, reschedule=True)
    with suppress(Exception), get_client(sync_client=True) as client:
        client.update_flow_run(own.id, tags={*tags, *own.tags})
        state = client.set_flow_run_state(own.id, paused).state
        if state is not None and state.is_paused():
            return state
    return None


def _name(error: Withheld) -> str:
    return REJECTED if isinstance(error, Rejected) else AWAITING_APPROVAL


def _show(flow_runs: Collection[UUID], state: "State[Any]") -> None:
    with suppress(Exception), get_client(sync_client=True) as client:
        for flow_run in flow_runs:
            client.set_flow_run_state(flow_run, state.fresh_copy(), force=True)
