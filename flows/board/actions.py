"""What a person decides about a run on the board: cancel, fork, approve, reject.

Each does what the command of the same name does. A driver that Prefect started is cancelled by Prefect, so that its
flow run shows it; another one on this machine gets the signal of Ctrl-C.
"""

import os
import shlex
import signal
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from cairn.configs.errors import BadInput
from cairn.configs.loader import from_manifest
from cairn.storage.ledger.leases import newest_lease
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.store.store import Store

Answer = dict[str, Any]
"""`sentence`, for the person; `run`, where there is a new one."""


def decide(store: Store, run: str, given: Mapping[str, str], *, approved: bool) -> Answer:
    """Approve or reject a run at the gate at which it waits."""
    from cairn.flows.reading import gates

    ledger = Ledger.open(store, run)
    config = from_manifest(ledger.manifest.config)
    decision = gates.decide(ledger, config, None, approved=approved, why=given.get("why") or None, by=None)
    return {"sentence": f"{'Approved' if approved else 'Rejected'} by {decision.by}, as decision {decision.number}."}


def cancel(store: Store, run: str, given: Mapping[str, str]) -> Answer:
    """Let the driver of a run end in order. Raises BadInput where nothing here can."""
    lease = newest_lease(store, run)
    if lease is None or lease.looks_over():
        raise BadInput(f"run {run} has no driver")
    if _has_prefect() and _cancelled_by_prefect(run, store.url):
        return {"sentence": "Prefect cancels the flow run; the driver saves a checkpoint and ends."}
    if lease.holder.is_gone() is not False:
        raise BadInput(f"the driver is pid {lease.holder.pid} on {lease.holder.host}: press Ctrl-C there")
    try:
        os.kill(lease.holder.pid, signal.SIGINT)
    except PermissionError:
        raise BadInput(f"the driver, pid {lease.holder.pid}, belongs to another user") from None
    return {"sentence": f"The driver, pid {lease.holder.pid}, was asked to end, as by Ctrl-C."}


def fork(store: Store, run: str, given: Mapping[str, str]) -> Answer:
    """Create a run that shares iterations of another one. Prefect starts it, where it serves the deployments."""
    from cairn.flows.history.fork import fork as forked

    name, iteration = given.get("name", ""), given.get("iteration", "")
    if not iteration.isdecimal():
        raise BadInput(f"{iteration!r} is not the number of an iteration")
    options = [line.strip() for line in given.get("options", "").splitlines() if line.strip()]
    forked(Ledger.open(store, run), int(iteration), name, options, given.get("why") or None)
    shared = f"{name} shares iterations 0 to {iteration} of {run}."
    if _has_prefect() and _started_by_prefect(name, store.url):
        return {"sentence": f"{shared} Prefect starts it.", "run": name}
    command = f"cairn resume {name} --store {shlex.quote(store.url)}"
    return {"sentence": f"{shared} Start it in the folder of its recipe: {command}", "run": name}


ACTIONS: Mapping[str, Callable[[Store, str, Mapping[str, str]], Answer]] = {
    "approve": partial(decide, approved=True),
    "reject": partial(decide, approved=False),
    "cancel": cancel,
    "fork": fork,
}


def _has_prefect() -> bool:
    """Whether this process was told of Prefect's server, as below `cairn up`."""
    return bool(os.environ.get("PREFECT_API_URL"))


def _cancelled_by_prefect(run: str, store_url: str) -> bool:
    """Cancel the flow run of a run's driver; return whether there is one."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.objects import StateType
    from prefect.states import Cancelling, State

    from cairn.flows.orchestration.flow_runs import run_tags

    wanted = {
        "tags": {"all_": sorted(run_tags(run, store_url))},
        "state": {"type": {"any_": [StateType.RUNNING]}},
        "parent_task_run_id": {"is_null_": True},
    }
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_run_filter=FlowRunFilter.model_validate(wanted))
        for flow_run in found:
            state: State[None] = Cancelling(message="Cancelled on the board")
            client.set_flow_run_state(flow_run.id, state)
    return bool(found)


def _started_by_prefect(run: str, store_url: str) -> bool:
    """Create a flow run of the deployment `resume` for a run; return whether Prefect has the deployment."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import DeploymentFilter, FlowFilter

    with get_client(sync_client=True) as client:
        found = client.read_deployments(
            flow_filter=FlowFilter.model_validate({"name": {"any_": ["resume"]}}),
            deployment_filter=DeploymentFilter.model_validate({"tags": {"all_": ["cairn"]}}),
        )
        for deployment in found[:1]:
            client.create_flow_run_from_deployment(deployment.id, parameters={"run": run, "store": store_url})
    return bool(found)
