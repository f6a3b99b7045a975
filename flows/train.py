"""`train`: execute all iterations of a run, from its last commit to its last iteration."""

import signal
import threading
import time
from collections.abc import Iterator, Sequence
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
from cairn.flows.driver.approval import Withheld, wait_for_approval
from cairn.flows.driver.preemption import Ending, Preempted, ending_in_order
from cairn.flows.driver.session import open_run, why_failed
from cairn.flows.events import IterationDone, OnEvent, RunDone, RunStarted
from cairn.flows.history.fork import CannotFork, fork, is_fork
from cairn.flows.orchestration.artifacts.publishing import Pages
from cairn.flows.orchestration.failed import failed_state
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
from cairn.flows.text import duration
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
from cairn.tasks.durable.quarantine import apply_requests
from cairn.tasks.durable.step import report_environment_change
from cairn.tasks.halves import oldest_open, publish_for_open_halves
from cairn.tasks.streaming.opening import open_stream
from cairn.tasks.trainer.checkpoint import checkpoint_due
from cairn.tasks.trainer.recovery import ReplayDiverged
from cairn.tasks.trainer.self_test import self_test_once

# Handling of a replay that produces other weights than were committed (`recovery.on_divergence`).


def fork_after_divergence(
    store: Store, run: str, error: ReplayDiverged, on_event: OnEvent, recipe: RunConfig | None = None
) -> str:
    """Fork the run at its newest checkpoint and return the fork's name. A fork that a driver made before is reused.

    The fork executes the iterations after the checkpoint again; their commits stay with the run. The fork's manifest
    records the reason. `recipe`: the recipe, where the user passed one.

    Raises `error` where `recovery.on_divergence` is "stop", and ReplayDiverged with the reason where no checkpoint
    exists or a fork would not help.
    """
    ledger = Ledger.open(store, run)
    if from_manifest(ledger.manifest.config).recovery.on_divergence == "stop":
        raise error
    saved = newest_checkpoint(ledger, ledger.last_iteration() or 0)
    if saved is None:
        raise ReplayDiverged(f"{error}. There is no checkpoint to fork the run at: set checkpoint.save_interval")
    if ledger.find(saved.iteration + 1, Step.TRAIN) is None:
        raise ReplayDiverged(
            f"{error}. Nothing was replayed: the checkpoint itself diverges, and a fork would not help"
        )
    if saved.iteration < ledger.first_iteration - 1:
        raise ReplayDiverged(
            f"{error}. The newest checkpoint, of iteration {saved.iteration}, is older than the fork {run}: a fork "
            f"there would repeat iterations of {ledger.owner(saved.iteration + 1).run} with the options of {run}"
        )
    name = f"{run}-from-{layout.digits(saved.iteration)}"
    try:
        if not is_fork(store, name, run, saved.iteration):
            fork(ledger, saved.iteration, name, reason=str(error), recipe=recipe)
    except (CannotFork, ConfigError, Retired, ValueError) as why:
        raise ReplayDiverged(f"{error}. The run cannot be forked as {name} either: {why}") from why
    on_event(Message(str(error), "warning"))
    on_event(
        Message(f"Run {run} is not changed; its fork {name} continues from iteration {saved.iteration}", "warning")
    )
    return name


def start(
    store: Store,
    run: str,
    config: RunConfig | None = None,
    takeover: bool = False,
    on_event: OnEvent = lambda event: None,
    relayout: Sequence[str] = (),
) -> str:
    """Train the run `run` in this process to its last iteration, from its last commit or from the start.

    Returns the name of the trained run: that of the fork where `recovery.on_divergence` made one.

    `config` creates the run or must equal the stored configuration; None uses the stored one, with `relayout` (see
    `open_run`). Raises the errors of `open_run`, and the error of a step after its last retry. Raises Withheld if the
    run needs a person's approval to continue, and Preempted if the driver was requested to end; see
    cairn.flows.driver.approval and cairn.flows.driver.preemption.
    """
    silence_console()
    try:
        with (
            ending_in_order() as ending,
            opened(store, run, config, takeover, on_event, ending, relayout) as (context, events),
            prefect_api(PREFECT_HOME),
        ):

            def train_opened(run: str, store: str) -> State[Any] | None:
                """Train a run that `cairn train` or `cairn resume` opened to its last iteration."""
                ending.watch("cancel", partial(cancelled, context, ending, current_flow_run().id))
                try:
                    drive(context, events, ending)
                except Withheld as error:
                    return end_of_driver(error, run, store)
                except Exception as error:
                    opened_store, given_up = context.ledger.store, context.retries.given_up
                    return failed_state(error, why_failed(opened_store, run, error, given_up), run)
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
        config: The configuration of a new run; leave it out to resume with the one in the ledger.
        takeover: Take over the run from a driver that is still alive.
    """
    opened_store = open_for_runs(store)
    try:
        start_in_flow(opened_store, run, config, takeover)
    except Withheld as error:
        return end_of_driver(error, run, store)
    except Exception as error:
        return failed_state(error, why_failed(opened_store, run, error), run)
    return None


def start_in_flow(
    store: Store,
    run: str,
    config: RunConfig | None,
    takeover: bool,
    on_event: OnEvent = lambda event: None,
) -> str:
    """Do what `start` does, inside a flow: the caller's flow run becomes that of the run. Where this raises Withheld,
    the caller must end its flow run with the result of `end_of_driver`."""
    try:
        with (
            ending_in_order() as ending,
            opened(store, run, config, takeover, on_event, ending) as (context, events),
        ):
            drive(context, events, ending)
    except ReplayDiverged as error:
        fork = fork_after_divergence(store, run, error, on_event, config)
        train(run=fork, store=store.url, config=config)
        return fork
    except Preempted as end:  # such as Cancel in the interface: Prefect knows what it meant by the signal
        raise TerminationSignal(signal.SIGTERM) from end
    return run


@contextmanager
def opened(
    store: Store,
    run: str,
    config: RunConfig | None,
    takeover: bool,
    on_event: OnEvent,
    ending: Ending,
    relayout: Sequence[str] = (),
) -> Iterator[tuple[RunContext, Watchers]]:
    """Open a run; yield its context and the object that passes events to `on_event` and to all watchers of the run."""
    events = Watchers(on_event)
    with (
        ending.in_order(),
        open_run(
            store, run, config, takeover=takeover, relayout=relayout, emit=events, on_lease=ending.set_lease
        ) as context,
        ending.in_order(),
        events.attached(watchers(context)),
    ):
        yield context, events


def watchers(run: RunContext) -> dict[str, Watcher]:
    """Return all watchers of the run by name. Raises ConfigError if a configured one cannot be used."""
    own: dict[str, Watcher] = {
        "The alarm check": Alarms(run.ledger, run.config, run.emit),
        "The display in Prefect's interface": Pages(run),
    }
    return {**own, **trackers(run.ledger, run.config)}


def cancelled(run: RunContext, ending: Ending, flow_run: UUID, over: threading.Event) -> float | None:
    """Wait until a person cancels the flow run in Prefect: a watch for `Ending.watch`. The end of the driver then
    confirms the cancellation."""
    if not wait_for_cancel(flow_run, over):
        return None
    run.emit(Message("This run was cancelled in Prefect", "warning"))
    ending.confirm = partial(confirm_cancel, flow_run)
    return inf


def drive(run: RunContext, on_event: Watchers, ending: Ending) -> None:
    """Execute every incomplete iteration, each as a flow run below the current one.

    Returns when the watchers have processed all events, while Prefect's server is still available to them.

    The newest iterations are entered again even if all their steps are committed: each step finds its own commit.
    """
    first = first_to_execute(run)
    total = run.config.rollout.num_rollout
    lease = run.ledger.lease
    assert lease is not None
    wait_for_engines(run)
    ending.set_run(run)
    on_event(RunStarted(run.ledger.run, lease.epoch, first, total))
    report_changed_environment(run, first)

    def learned(index: int) -> None:
        if run.config.self_tests and index == first and index + 1 < total:
            self_test_once(run, run.committed(index, Step.TRAIN))

    driver = current_flow_run()

    def approved(index: int) -> None:
        wait_for_approval(run, index, lambda gate, sentence: waiting(driver, run.ledger.run, gate, sentence))
        apply_requests(run, index)

    pipeline = Pipeline(
        run,
        PrefectSteps(run),
        first,
        learned=learned,
        saved=partial(remove_old_files, run),
        stop=ending.stop_work,
        approved=approved,
    )

    def one_iteration(run_name: str, index: int) -> list[Commit]:
        """Execute the DAG of flows/iteration.py."""
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


def first_to_execute(run: RunContext) -> int:
    """Return the oldest iteration that a driver enters: the oldest open one, or the one before it if its checkpoint was
    still being written and the next update has not been made."""
    first = oldest_open(run.ledger)
    before = first - 1
    if before < run.ledger.first_iteration or not checkpoint_due(run.config, before):
        return first
    made = run.find(before, Step.CHECKPOINT) is not None or run.find(first, Step.TRAIN) is not None
    return first if made else before


def remove_old_files(run: RunContext) -> None:
    """After a checkpoint, remove the files that the configuration does not retain."""
    try:
        retire(run.ledger, run.config.checkpoint)
    except (Damaged, StoreError) as error:  # the run itself lacks nothing; the next checkpoint tries again
        run.emit(Message(f"Older files are not deleted for now: {error}", "warning"))


def wait_for_engines(run: RunContext) -> None:
    """Wait until all engines are up, so that no step's duration contains their start."""
    began = time.monotonic()
    engines, waited = len(run.fleet.engines), time.monotonic() - began
    up = "1 engine is up" if engines == 1 else f"{engines} engines are up"
    run.emit(Message(up + (f" after {duration(waited)}" if waited >= 1 else "")))


def report_changed_environment(run: RunContext, first: int) -> None:
    """Report differences from the environment of the newest steps: bitwise equality holds only between equal
    environments."""
    fleet = run.fleet
    engines: dict[tuple[Step, str | None], Environment] = {(Step.TRAIN, None): fleet.training.environment}
    if run.config.samples_responses:
        engines[Step.ROLLOUT, "00-000"] = fleet.generating_environment(fleet.membership.serving()[0])
    for (step, shard), now in engines.items():
        newest = run.find(first, step, shard) or (run.find(first - 1, step, shard) if first else None)
        if newest is not None:
            report_environment_change(run, newest, now)
