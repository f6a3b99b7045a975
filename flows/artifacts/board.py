"""Artifacts of Prefect's, as far as pages need them: made, found and replaced by their keys.

    run-<name>-<digits>              the page of a run: one artifact a driver, replaced while it works
    run-<name>-<digits>-iteration    the pages of its iterations: one artifact an iteration, never replaced
    run-<name>-<digits>-progress     how far the step that runs is: one artifact a driver

The digits belong to the run's manifest, so no two runs share a key and a run keeps its own wherever its driver is.
"""

from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.sorting import ArtifactSort
from prefect.context import FlowRunContext, TaskRunContext

from cairn.flows.text.markdown import slug
from cairn.storage.ledger import Ledger

PAGE = 200
"""Artifacts that Prefect gives at once."""
_LONGEST_NAME = 60


def run_key(ledger: Ledger) -> str:
    """Of a run's page, and the beginning of its other keys."""
    return f"run-{slug(ledger.run)[:_LONGEST_NAME]}-{ledger.manifest.identity[:12]}"


class Board:
    """The artifacts of one run. Used by one thread; connects when it is first asked for something, and again after
    what raised."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._client: SyncPrefectClient | None = None

    def create(self, suffix: str, type: str, data: Any, description: str, flow_run: UUID | None) -> UUID:
        """Make an artifact of a flow run; returns its id."""
        artifact = ArtifactCreate(
            key=self._key + suffix, type=type, data=data, description=description, flow_run_id=flow_run
        )
        return self._connected().create_artifact(artifact).id

    def replace(self, artifact: UUID, data: Any, description: str) -> None:
        """Give an artifact another content."""
        # Not by the client's own method: it sends the content a second time, as an event.
        self._connected().request(
            "PATCH",
            "/artifacts/{id}",
            json={"data": data, "description": description},
            path_params={"id": artifact},
        )

    def descriptions(self, suffix: str, limit: int) -> list[str]:
        """Of the newest artifacts of a key, the newest first."""
        found: list[str] = []
        while len(found) < limit:
            page = self._connected().read_artifacts(
                artifact_filter=ArtifactFilter.model_validate({"key": {"any_": [self._key + suffix]}}),
                sort=ArtifactSort.CREATED_DESC,
                limit=min(PAGE, limit - len(found)),
                offset=len(found),
            )
            found += [artifact.description or "" for artifact in page]
            if len(page) < PAGE:
                break
        return found

    def close(self) -> None:
        """Let go of the connection; the next call makes another."""
        client, self._client = self._client, None
        if client is not None:
            client.__exit__(None, None, None)

    def _connected(self) -> SyncPrefectClient:
        if self._client is None:
            self._client = get_client(sync_client=True).__enter__()
        return self._client


def current_flow_run_id() -> UUID | None:
    """The flow run that the code runs in, be it in the flow's body or in a task."""
    task, flow = TaskRunContext.get(), FlowRunContext.get()
    if task is not None:
        return task.task_run.flow_run_id
    return None if flow is None or flow.flow_run is None else flow.flow_run.id
