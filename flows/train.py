"""`train`: all iterations of a run, from its last commit to its last iteration."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prefect import flow

from configs.schema.run import RunConfig
from flows.events import Event, IterationDone, OnEvent, RunDone, RunStarted
from flows.handover import OpenedRun, handed_over, handing_over
from flows.iteration import iteration
from flows.orchestration import driving, silence_console, subflow
from flows.server import prefect_api
from flows.session import open_run
from flows.steps import PrefectSteps
from flows.tracking import tracked
from storage.commits import Commit, Step
from storage.errors import Damaged, StoreError
from storage.retention import retire
from tasks.context import RunContext
from tasks.events import Message
from tasks.recovery import checkpoint_due

PREFECT_HOME = Path(".cairn/prefect")
"""Database and log of the embedded Prefect server, below the folder one stands in."""


def start(
    store_url: str,
    run: str,
    config: RunConfig | None = None,
    takeover: bool = False,
    on_event: OnEvent = lambda event: None,
) -> None:
    """Train the run `run` in this process to its last iteration, from its last commit or from the start.

    `config` creates the run or must equal the one it has; None takes the ledger's. Raises what `open_run` raises, and
    what a step raised after its last try.
    """
    silence_console()
    with (
        opened(store_url, run, config, takeover, on_event) as pair,
        prefect_api(PREFECT_HOME),
        handing_over(pair),
    ):
        train(run=run, store=store_url)


@flow(name="train", flow_run_name="{run}", persist_result=False)
def train(run: str, store: str = ".", config: RunConfig | None = None, takeover: bool = False) -> None:
    """Train a run to its last iteration, from its last commit or from the start.

    Args:
        run: Name of the run.
        store: Root of the ledger: a folder or s3://bucket/prefix.
        config: The configuration of a new run; leave it out to go on with the one in the ledger.
        takeover: Take the run from a driver that still lives.
    """
    pair = handed_over()
    if pair is not None:
        drive(*pair)
        return
    with opened(store, run, config, takeover, lambda event: None) as pair:
        drive(*pair)


@contextmanager
def opened(store: str, run: str, config: RunConfig | None, takeover: bool, watcher: OnEvent) -> Iterator[OpenedRun]:
    """A run and whom to tell what happens: its TensorBoard files and the watcher."""
    with (
        open_run(store, run, config, takeover=takeover, emit=watcher) as context,
        tracked(context.ledger, context.config) as board,
    ):

        def tell(event: Event) -> None:
            board(event)
            watcher(event)

        yield context, tell


def drive(run: RunContext, on_event: OnEvent) -> None:
    """Execute every iteration that is not complete, each as a flow run of its own below the current one.

    The newest iteration is entered again even if all its steps are there: which of them are, the steps find out.
    """
    first = max(run.ledger.last_iteration() or 0, run.ledger.first_iteration)
    total = run.config.rollout.num_rollout
    lease = run.ledger.lease
    assert lease is not None
    wait_for_engines(run)
    on_event(RunStarted(run.ledger.run, lease.epoch, first, total))
    report_changed_environment(run, first)
    steps = PrefectSteps(run)

    def one_iteration(run_name: str, index: int) -> list[Commit]:
        """The DAG of flows/iteration.py."""
        return iteration(run, steps, index)

    with driving(run.ledger.run, run.ledger.store.url) as tags:
        iterate = subflow(one_iteration, name="iteration", run_name="{run_name} {index:06d}", tags=tags)
        for index in range(first, total):
            before = run.ledger.store.retries
            commits = tuple(iterate(run.ledger.run, index))
            on_event(IterationDone(index, commits, run.ledger.store.retries - before))
            remove_old_files(run, index)
    trained = run.committed(total - 1, Step.TRAIN)
    assert trained.weight_version_out is not None
    assert trained.state_digest is not None
    retries = run.ledger.store.retries
    on_event(RunDone(run.ledger.run, trained.weight_version_out, trained.state_digest, retries))


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
    """Tell what differs from where the newest train step ran: bitwise equality is claimed between equals only."""
    before: Commit | None = run.find(first, Step.TRAIN) or (run.find(first - 1, Step.TRAIN) if first else None)
    if before is None:
        return
    then, now = before.environment.model_dump(exclude={"host"}), run.environment.model_dump(exclude={"host"})
    changed = {name: (then[name], now[name]) for name in then if then[name] != now[name]}
    if changed:
        described = "; ".join(f"{name} was {old}, is {new}" for name, (old, new) in changed.items())
        run.emit(
            Message(
                f"The environment is not that of the run so far ({described}): bits may differ from here on", "warning"
            )
        )
