"""`train`: all iterations of a run, from its last commit to its last iteration."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from math import inf
from typing import Any
from uuid import UUID

from prefect import Flow, flow
from prefect.exceptions import TerminationSignal
from prefect.states import State

from cairn.configs.schema.run import RunConfig
from cairn.flows.artifacts.publishing import Pages
from cairn.flows.driver.approval import Withheld, admit
from cairn.flows.driver.divergence import fork_after_divergence
from cairn.flows.driver.preemption import Ending, Preempted, ending_in_order
from cairn.flows.driver.session import open_run
from cairn.flows.driver.withheld import end_of_driver, end_of_iteration, end_paused, waiting
from cairn.flows.events import IterationDone, OnEvent, RunDone, RunStarted
from cairn.flows.orchestration.flow_runs import (
    confirm_cancel,
    current_flow_run,
    driving,
    silence_console,
    subflow,
    wait_for_cancel,
)
from cairn.flows.orchestration.server import PREFECT_HOME, prefect_api
from cairn.flows.orchestration.steps import PrefectSteps
from cairn.flows.pipeline import Pipeline
from cairn.flows.trackers import trackers
from cairn.flows.watching.alarms import Alarms
from cairn.flows.watching.watchers import Watcher, Watchers
from cairn.storage.commits import Commit, Environment, Step
from cairn.storage.errors import Damaged, StoreError
from cairn.storage.retention import retire
from cairn.storage.store import Store, open_for_runs
from cairn.tasks.checkpoint import checkpoint_due
from cairn.tasks.context import RunContext
from cairn.tasks.environment import tell_changed_environment
from cairn.tasks.events import Message
from cairn.tasks.halves import oldest_open, publish_for_open_halves
from cairn.tasks.quarantine import put_in_force
from cairn.tasks.recovery import ReplayDiverged
from cairn.tasks.self_test import self_test_once
from cairn.tasks.streaming.opening import open_stream


def start(
    store: Store,
    run: str,
    config: RunConfig | None = None,
    takeover: bool = False,
    on_event: OnEvent = lambda event: None,
) -> str:
    """Train the run `run` in this process to its last iteration, from its last commit or from the start. Returns the
    name of the run that was trained: that of a fork where `recovery.on_divergence` made one.

    `config` creates the run or must equal the one it has; None takes the ledger's. Raises what `open_run` raises, and
    what a step raised after its last try. Raises Withheld if the run may not go on until somebody approves it, and
    Preempted if the driver was told to end; see cairn.flows.driver.approval and cairn.flows.driver.preemption.
    """
    silence_console()
    try:
        with (
            ending_in_order() as ending,
            opened(store, run, config, takeover, on_event, ending) as (context, tell),
            prefect_api(PREFECT_HOME),
        ):

            def train_opened(run: str, store: str) -> State[Any] | None:
                """A run that `cairn train` or `cairn resume` opened, to its last iteration."""
                ending.watch("cancel", partial(cancelled, context, ending, current_flow_run().id))
                try:
                    drive(context, tell, ending)
                except Withheld as error:
                    return end_of_driver(error, run, store)
                return None

            try:
                Flow(train_opened, name=train.name, flow_run_name="{run}", persist_result=False)(run, store.url)
            except Preempted:
                ending.confirm()
                raise
    except ReplayDiverged as error:
        fork = fork_after_divergence(store, run, error, on_event, config)
        return start(store, fork, config, on_event=on_event)
    return run


@flow(name="train", flow_run_name="{run}", persist_result=False)
def train(run: str, store: str = ".", config: RunConfig | None = None, takeover: bool = False) -> State[Any] | None:
    """Train a run to its last iteration, from its last commit or from the start.

    Args:
        run: Name of the run.
        store: Root of the ledger: a folder or s3://bucket/prefix.
        config: The configuration of a new run; leave it out to go on with the one in the ledger.
        takeover: Take the run from a driver that still lives.
    """
    try:
        go_on(open_for_runs(store), run, config, takeover)
    except Withheld as error:
        return end_of_driver(error, run, store)
    return None


def go_on(
    store: Store,
    run: str,
    config: RunConfig | None,
    takeover: bool,
    on_event: OnEvent = lambda event: None,
) -> str:
    """The same as `start`, for the body of a flow, whose flow run is then the run's: where Withheld is raised, it is to
    end as `end_of_driver` says."""
    try:
        with (
            ending_in_order() as ending,
            opened(store, run, config, takeover, on_event, ending) as (context, tell),
        ):
            drive(context, tell, ending)
    except ReplayDiverged as error:
        fork = fork_after_divergence(store, run, error, on_event, config)
        train(run=fork, store=store.url, config=config)
        return fork
    except Preempted as end:  # such as Cancel in the interface: Prefect knows what it meant by the signal
        raise TerminationSignal(signal.SIGTERM) from end
    return run


@contextmanager
def opened(
    store: Store, run: str, config: RunConfig | None, takeover: bool, teller: OnEvent, ending: Ending
) -> Iterator[tuple[RunContext, Watchers]]:
    """A run and whom to tell what happens: the teller, and whoever watches it."""
    tell = Watchers(teller)
    with (
        ending.in_order(),
        open_run(store, run, config, takeover=takeover, emit=tell, on_lease=ending.owns) as context,
        ending.in_order(),
        tell.joined_by(watchers(context)),
    ):
        yield context, tell


def watchers(run: RunContext) -> dict[str, Watcher]:
    """All that watch the run, by their names. Raises ConfigError if one that it asks for cannot be used."""
    own: dict[str, Watcher] = {
        "What sounds alarms": Alarms(run.ledger, run.config, run.emit),
        "What Prefect's interface shows of the run": Pages(run),
    }
    return {**own, **trackers(run.ledger, run.config)}


def cancelled(run: RunContext, ending: Ending, flow_run: UUID, over: threading.Event) -> float | None:
    """For `Ending.watch`: wait until somebody cancels the flow run in Prefect, whose answer the end then is."""
    if not wait_for_cancel(flow_run, over):
        return None
    run.emit(Message("Somebody cancels this run in Prefect", "warning"))
    ending.confirm = partial(confirm_cancel, flow_run)
    return inf


def drive(run: RunContext, on_event: Watchers, ending: Ending) -> None:
    """Execute every iteration that is not complete, each as a flow run of its own below the current one. Returns when
    those who watch have seen all of it, while Prefect's server is still there for them.

    The newest iterations are entered again even if all their steps are there: which of them are, the steps find out.
    """
    first = oldest_open(run.ledger)
    total = run.config.rollout.num_rollout
    lease = run.ledger.lease
    assert lease is not None
    wait_for_engines(run)
    ending.works(run)
    on_event(RunStarted(run.ledger.run, lease.epoch, first, total))
    report_changed_environment(run, first)

    def learned(index: int) -> None:
        remove_old_files(run, index)
        if run.config.self_tests and index == first and index + 1 < total:
            self_test_once(run, run.committed(index, Step.TRAIN))

    driver = current_flow_run()

    def admitted(index: int) -> None:
        admit(run, index, lambda gate, sentence: waiting(driver, run.ledger.run, gate, sentence))
        put_in_force(run, index)

    pipeline = Pipeline(run, PrefectSteps(run), first, learned=learned, stop=ending.stop_work, admit=admitted)

    def one_iteration(run_name: str, index: int) -> list[Commit]:
        """The DAG of flows/iteration.py."""
        return pipeline.iterate(index)

    with ending.in_order(), driving(run.ledger.run, run.ledger.store.url, lease.check) as tags:
        end_paused(driver, tags, lease.check)
        publish_for_open_halves(run)
        streaming = run.config.rollout.pipeline == "streaming"
        before = run.ledger.store.retries
        flow = subflow(
            one_iteration,
            name="iteration",
            run_name="{run_name} {index:06d}",
            tags=tags,
            ends_in=end_of_iteration,
        )
        with (
            open_stream(run) if streaming else nullcontext(),
            closing(pipeline.run(partial(flow, run.ledger.run), total)) as iterations,
        ):
            for index, commits in iterations:
                retries = run.ledger.store.retries
                on_event(IterationDone(index, tuple(commits), retries - before))
                before = retries
    trained = run.committed(total - 1, Step.TRAIN)
    assert trained.weight_version_out is not None
    assert trained.state_digest is not None
    retries = run.ledger.store.retries
    on_event(RunDone(run.ledger.run, trained.weight_version_out, trained.state_digest, retries))
    on_event.settle()


def remove_old_files(run: RunContext, index: int) -> None:
    """After a checkpoint, remove the files that the configuration does not keep."""
    if not checkpoint_due(run.config, index):
        return
    try:
        retire(run.ledger, run.config.checkpoint)
    except (Damaged, StoreError) as error:  # the run itself lacks nothing; the next checkpoint tries again
        run.emit(Message(f"Older files stay for now: {error}", "warning"))


def wait_for_engines(run: RunContext) -> None:
    """Return when they are up, so that no step's time holds their start."""
    began = time.monotonic()
    engines = len(run.fleet.engines)
    run.emit(Message(f"{engines} engines are up after {time.monotonic() - began:.1f} s more"))


def report_changed_environment(run: RunContext, first: int) -> None:
    """Tell what differs from where the newest steps ran: bitwise equality is claimed between equals only."""
    fleet = run.fleet
    engines: dict[tuple[Step, str | None], Environment] = {(Step.TRAIN, None): fleet.training.environment}
    if run.config.samples_responses:
        engines[Step.ROLLOUT, "00-000"] = fleet.generating_environment(fleet.membership.serving()[0])
    for (step, shard), now in engines.items():
        newest = run.find(first, step, shard) or (run.find(first - 1, step, shard) if first else None)
        if newest is not None:
            tell_changed_environment(run, newest, now)
