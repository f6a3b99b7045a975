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

from cairn.configs.errors import ConfigError
from cairn.configs.loader import from_manifest
from cairn.configs.schema.run import RunConfig
from cairn.flows.driver.approval import Withheld, admit
from cairn.flows.driver.preemption import Ending, Preempted, ending_in_order
from cairn.flows.driver.session import open_run
from cairn.flows.events import IterationDone, OnEvent, RunDone, RunStarted
from cairn.flows.history.fork import CannotFork, fork
from cairn.flows.orchestration.artifacts.publishing import Pages
from cairn.flows.orchestration.flow_runs import (
    PrefectSteps,
    confirm_cancel,
    current_flow_run,
    driving,
    silence_console,
    subflow,
    wait_for_cancel,
)
from cairn.flows.orchestration.server import PREFECT_HOME, prefect_api
from cairn.flows.orchestration.withheld import end_of_driver, end_of_iteration, end_paused, waiting
from cairn.flows.pipeline import Pipeline
from cairn.flows.watching.alarms import Alarms
from cairn.flows.watching.trackers import trackers
from cairn.flows.watching.watchers import Watcher, Watchers
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_for_runs
from cairn.storage.records import Environment
from cairn.storage.store.errors import Damaged, Retired, StoreError
from cairn.storage.store.store import Store
from cairn.storage.upkeep.retention import newest_checkpoint, retire
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.quarantine import put_in_force
from cairn.tasks.durable.step import tell_changed_environment
from cairn.tasks.halves import oldest_open, publish_for_open_halves
from cairn.tasks.streaming.opening import open_stream
from cairn.tasks.trainer.checkpoint import checkpoint_due
from cairn.tasks.trainer.recovery import ReplayDiverged
from cairn.tasks.trainer.self_test import self_test_once

# What a driver does when replay gives other weights than were committed (`recovery.on_divergence`).


def fork_after_divergence(
    store: Store, run: str, error: ReplayDiverged, on_event: OnEvent, given: RunConfig | None = None
) -> str:
    """Fork the run at its newest checkpoint, as it asks for, unless that was done; returns the fork's name. The fork's
    manifest says why there is one.

    The iterations after the checkpoint are done again by the fork: what they committed stays with the run. `given`:
    the recipe, where the user gave one. Raises `error` where the run asks to stop, and says so where there is no
    checkpoint to go on from, or none that a fork would help.
    """
    ledger = Ledger.open(store, run)
    if from_manifest(ledger.manifest.config).recovery.on_divergence == "stop":
        raise error
    saved = newest_checkpoint(ledger, ledger.last_iteration() or 0)
    if saved is None:
        raise ReplayDiverged(f"{error}. No checkpoint is there to fork the run at: set checkpoint.save_interval")
    if ledger.find(saved.iteration + 1, Step.TRAIN) is None:
        raise ReplayDiverged(
            f"{error}. Nothing was replayed: the checkpoint itself diverges, for a fork of the run too"
        )
    if saved.iteration < ledger.first_iteration - 1:
        raise ReplayDiverged(
            f"{error}. The newest checkpoint, of iteration {saved.iteration}, lies before {run} was forked: a fork "
            f"there would do iterations of {ledger.owner(saved.iteration + 1).run} again with the options of {run}"
        )
    name = f"{run}-from-{layout.digits(saved.iteration)}"
    try:
        if not _is_there(ledger, name, saved.iteration):
            fork(ledger, saved.iteration, name, reason=str(error), given=given)
    except (CannotFork, ConfigError, Retired, ValueError) as why:
        raise ReplayDiverged(f"{error}. The run cannot be forked as {name} either: {why}") from why
    on_event(Message(str(error), "warning"))
    on_event(Message(f"Run {run} stays as it is; its fork {name} goes on from iteration {saved.iteration}", "warning"))
    return name


def _is_there(ledger: Ledger, name: str, iteration: int) -> bool:
    """Whether a driver has made this fork before."""
    if not ledger.store.exists(layout.run_manifest(name)):
        return False
    parent = Ledger.open(ledger.store, name).manifest.parent
    return parent is not None and (parent.run, parent.iteration) == (ledger.run, iteration)


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
