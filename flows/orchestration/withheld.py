"""How Prefect shows that a run may not go on until a person says so (`cairn.flows.driver.approval`).

| the run | state of its driver's flow run | executed again by | of the iteration's |
|---|---|---|---|
| waits, and its driver with it | AwaitingApproval, of type Running | | the same |
| waits, and its driver has ended | AwaitingApproval, of type Paused | Resume | AwaitingApproval, of type Cancelled |
| was rejected | Rejected, of type Cancelled | Retry | the same |

The message of each is the sentence that says how to decide, and what goes on then. None of these is started again by
itself. A flow run that no deployment made cannot be executed again, and is cancelled in the place of paused.

The event `cairn.approval.requested` is for automations. Prefect may be away: the ledger says the same.
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
from prefect.states import Cancelled, Paused, Running, State

from cairn.flows.driver.approval import AwaitingApproval, Rejected, Withheld
from cairn.flows.events import Stopping
from cairn.flows.orchestration.flow_runs import current_flow_run, run_tags
from cairn.storage.ledger.decisions import GateStanding

AWAITING_APPROVAL = "AwaitingApproval"
REJECTED = "Rejected"
"""Names of states."""

REQUESTED = "cairn.approval.requested"
"""Name of the event."""

GONE_ON = "A later driver has gone on with the run"


@contextmanager
def waiting(driver: FlowRun, run: str, gate: GateStanding, sentence: str) -> Iterator[None]:
    """Show, for the length of the block, that a run waits at a gate, and its driver with it."""
    shown = {driver.id, current_flow_run().id}
    _show(shown, Running(name=AWAITING_APPROVAL, message=sentence))
    tell_requested(driver, run, gate)
    try:
        yield
    finally:
        _show(shown, Running())


def tell_requested(driver: FlowRun, run: str, gate: GateStanding) -> None:
    """Raise the event: somebody is to decide."""
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
                "approve": f"cairn approve {run} {gate.iteration}",
                "reject": f"cairn reject {run} {gate.iteration}",
            },
        )


def end_of_iteration(error: Exception) -> "State[Any] | None":
    """For `subflow`: the state of an iteration that may not begin, or does not since its driver ends."""
    if isinstance(error, Withheld):
        return Cancelled(name=_name(error), message=str(error))
    return Cancelled(message=str(error)) if isinstance(error, Stopping) else None


def end_of_driver(error: Withheld, run: str, store_url: str) -> "State[Any]":
    """The state for the body of the current flow run, which drove the run, to return: its caller then gets the error.
    Raises Pause where the flow run can be executed again, for Prefect's engine."""
    own = current_flow_run()
    if isinstance(error, AwaitingApproval):
        tell_requested(own, run, error.gate)
        if own.deployment_id is not None and (paused := _pause(own, str(error), run_tags(run, store_url))) is not None:
            raise Pause(state=paused)
    return Cancelled(name=_name(error), message=str(error), data=error)


def end_paused(driver: FlowRun, tags: Collection[str], require_held: Callable[[], None]) -> None:
    """Cancel the run's flow runs that wait for a person, but for the driver's own: it has the lease, and none of them
    need be resumed any more. `require_held` raises LeaseLost if they are a later driver's."""
    waits = FlowRunFilter.model_validate(
        {
            "tags": {"all_": sorted(tags)},
            "state": {"type": {"any_": [StateType.PAUSED]}, "name": {"any_": [AWAITING_APPROVAL]}},
            "id": {"not_any_": [driver.id]},
        }
    )
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=waits)
    if found:
        require_held()
        _show({flow_run.id for flow_run in found}, Cancelled(message=GONE_ON))


def _pause(own: FlowRun, sentence: str, tags: Collection[str]) -> "State[Any] | None":
    """The state that it then has; None where Prefect's server will not pause it."""
    paused: State[Any] = Paused(name=AWAITING_APPROVAL, message=sentence, reschedule=True)
    with suppress(Exception), get_client(sync_client=True) as client:
        client.update_flow_run(own.id, tags={*tags, *own.tags})
        found = client.set_flow_run_state(own.id, paused).state
        if found is not None and found.is_paused():
            return found
    return None


def _name(error: Withheld) -> str:
    return REJECTED if isinstance(error, Rejected) else AWAITING_APPROVAL


def _show(flow_runs: Collection[UUID], state: "State[Any]") -> None:
    with suppress(Exception), get_client(sync_client=True) as client:
        for flow_run in flow_runs:
            client.set_flow_run_state(flow_run, state.fresh_copy(), force=True)
