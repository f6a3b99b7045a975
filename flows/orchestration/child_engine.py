"""A flow run below the current one, made in two requests of Prefect's API and read in a third.

Prefect's own engine sends seven before the body of a subflow begins: it asks whether the flow is there, and whether the
flow run, which gets its name and its first states one after the other. Here the flow is asked for once, and the flow
run is made with its name, running. It is always a new one. All else is left to Prefect's engine.
"""

from typing import Any
from uuid import UUID, uuid4

from prefect import Flow, Task
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import FlowRunCreate
from prefect.client.schemas.objects import FlowRun, FlowRunPolicy
from prefect.context import FlowRunContext, TagsContext
from prefect.flow_engine import FlowRunEngine
from prefect.states import Pending, Running, State, to_state_create


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
