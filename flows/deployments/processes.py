"""Which process executes a flow run, as the flow run itself tells it: not every flow run has a run's lease."""

import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun

from cairn.storage.holders import Holder

PROCESS, SAID_AT = "cairn.process", "cairn.said_at"
"""Labels of the flow run: the process as JSON, and when it said so in Unix seconds."""


def say_who_executes(flow_run: UUID) -> None:
    """To be called by the process that does, before anything else."""
    labels: dict[str, Any] = {PROCESS: Holder.this_process().model_dump_json(), SAID_AT: time.time()}
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(flow_run, labels)


def killed_at_work(client: SyncPrefectClient, flow_run: FlowRun) -> float | None:
    """When the process that executed the flow run said that it does, if it is gone; None where it lives, or this
    machine cannot tell, or a newer try has not said who executes it."""
    said, at = flow_run.labels.get(PROCESS), flow_run.labels.get(SAID_AT)
    if not isinstance(said, str) or not isinstance(at, float) or not Holder.model_validate_json(said).is_gone():
        return None
    tries = [state.timestamp.timestamp() for state in client.read_flow_run_states(flow_run.id) if state.is_pending()]
    return at if at > max(tries, default=0.0) else None
