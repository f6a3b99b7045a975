"""The deployed flows: `cairn up` and `prefect deploy` offer them in Prefect's UI.

Their parameters are the form that a person fills in, see `cairn.flows.deployments.forms`. Each flow does what the
command of the same name does. A Retry of a flow run executes it again with the same parameters: `train` and `resume`
continue from the last commit, the others start from the beginning.

A run has at most one driver: the run's lease rejects a second one, with a message that names the first. A flow run that
`cairn up` started ends in order when `cairn up` ends.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec
from uuid import UUID

from prefect import Flow, flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.states import Completed, Failed, State
from pydantic import Field

from cairn.configs.catalogue import recipe_path
from cairn.configs.loader import from_manifest, load
from cairn.configs.schema.run import RunConfig
from cairn.engines.processes.deferred import defer_compiler
from cairn.flows.deployments import NAMES
from cairn.flows.deployments.forms import (
    EMPTY,
    SAME_GRADER,
    UNCHANGED_ENGINE,
    UNCHANGED_SAMPLING,
    Engine,
    Options,
    Recipe,
    RewardOptions,
    RunName,
    RunNameOrNone,
    Sampling,
    set_lines,
)
from cairn.flows.deployments.watching import record_process
from cairn.flows.events import Event, IterationDone, RunStarted
from cairn.flows.orchestration.artifacts.pages import board_link, board_page
from cairn.flows.orchestration.failed import failed_state
from cairn.flows.text import slug
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_for_runs, open_store
from cairn.storage.store.store import Store
from cairn.tasks.durable.events import Message

STORE = "CAIRN_STORE"
"""Environment variable: store of flow runs whose form leaves it empty."""

SERVER_PID = "CAIRN_SERVED_BY"
"""Environment variable: id of the process with which a flow run ends."""

Parameters = ParamSpec("Parameters")
Restarts = Annotated[int, Field(ge=0, le=1000)]
Iteration = Annotated[int, Field(ge=0, le=999_999)]
Range = Annotated[str, Field(pattern="^([0-9]{1,6}(:([0-9]{1,6})?)?)?$")]


def _served(body: Callable[Parameters, State[Any]]) -> Callable[Parameters, State[Any]]:
    """Wrap a flow's body: record the process that executes the flow run, end in order when the serving process ends,
    and end in a state that says why where it fails."""

    @wraps(body)
    def run_with_server(*args: Parameters.args, **kwargs: Parameters.kwargs) -> State[Any]:
        server = os.environ.get(SERVER_PID)
        if server is not None and os.getppid() == int(server):
            threading.Thread(target=_end_with, args=(int(server),), name="served-by", daemon=True).start()
        if flow_run.id is not None:
            record_process(UUID(flow_run.id))
        defer_compiler()
        try:
            return body(*args, **kwargs)
        except Exception as error:
            return _failed(error)

    return run_with_server


def _failed(error: Exception) -> State[Any]:
    """Return the final state of a flow run that has failed."""
    from cairn.flows.driver.session import why_failed
    from cairn.flows.reading.failure import RunFailure

    run, store = flow_run.parameters.get("new") or _name_of_run(), _place(flow_run.parameters.get("store") or "")
    try:
        failure = why_failed(open_store(store), run, error)
    except Exception:  # there is no such store
        failure = RunFailure(what=str(error) or type(error).__name__)
    # The process of the flow run ends with the error, which Prefect would log as unexpected.
    logging.getLogger("prefect.flow_runs").addFilter(
        lambda record: not (record.exc_info and record.exc_info[1] is error)
    )
    return failed_state(error, failure, run)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _name_of_run() -> str:
    parameters: dict[str, Any] = flow_run.parameters
    return str(parameters.get("run") or Path(parameters.get("recipe") or "run").stem)


def _place(store: str) -> str:
    return store or os.environ.get(STORE) or "."


@flow(name="train", flow_run_name=_name_of_run, persist_result=False)
@_served
def train(
    recipe: Recipe,
    run: RunNameOrNone = "",
    options: Options = EMPTY,
    set: str = "",
    restarts: Restarts = 0,
    takeover: bool = False,
    store: str = "",
) -> State[Any]:
    """Start a run, or resume the run of that name from its last commit. Its configuration is fixed at the first start.

    Args:
        recipe: Recipe of the run. Your own recipes are the YAML files of the folder in which `cairn up` was started,
            and of recipes/ and configs/recipes/ in it.
        run: Name of the run, letters, digits, '.', '_' and '-'; by default that of the recipe's file.
        options: Options that are often changed. An empty one keeps the recipe's value.
        set: All other options of docs/configuration.md, one a line: algorithm.kl_loss_coef=0.001
        restarts: Number of automatic restarts after the driver was killed.
        takeover: Take over the run from a driver that is still alive; that driver stops.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    overrides, name = [*options.overrides(), *set_lines(set)], run or Path(recipe).stem
    path = recipe_path(recipe)
    # The run's lease records how a person can start the same from a terminal.
    sys.argv = ["cairn", "train", str(path), "--run", name, *(word for one in overrides for word in ("--set", one))]
    config = load(path, overrides, get_run_logger().warning)
    return _driven(open_for_runs(_place(store)), name, config, takeover)


@flow(name="resume", flow_run_name="{run}", persist_result=False)
@_served
def resume(run: RunName, restarts: Restarts = 0, takeover: bool = False, store: str = "") -> State[Any]:
    """Resume a run from its last commit, with the configuration in its ledger.

    Args:
        run: Name of the run.
        restarts: Number of automatic restarts after the driver was killed.
        takeover: Take over the run from a driver that is still alive; that driver stops.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    return _driven(open_for_runs(_place(store)), run, None, takeover)


@flow(name="fork", flow_run_name="{run}@{iteration} {new}", persist_result=False)
@_served
def fork(
    run: RunName,
    iteration: Iteration,
    new: RunName,
    options: Options = EMPTY,
    set: str = "",
    restarts: Restarts = 0,
    store: str = "",
) -> State[Any]:
    """Create a run that shares another run's iterations up to one of them, and train it to its end with other options.

    Args:
        run: The run to fork; it does not change.
        iteration: The last iteration that the new run shares with it.
        new: Name of the new run.
        options: Options that are often changed. An empty one keeps the forked run's value.
        set: All other options of docs/configuration.md, one a line: algorithm.kl_loss_coef=0.001
        restarts: Number of automatic restarts after the driver was killed.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    from cairn.flows.history.fork import fork as forked
    from cairn.flows.history.fork import is_fork

    ledgers = open_for_runs(_place(store))
    if not is_fork(ledgers, new, run, iteration):  # an earlier attempt of this flow run may have made it
        ledger, warn = Ledger.open(ledgers, run), get_run_logger().warning
        forked(ledger, iteration, new, [*options.overrides(), *set_lines(set)], note=warn)
    return _driven(ledgers, new)


@flow(name="verify", flow_run_name="{run}", persist_result=False)
@_served
def verify(run: RunName, store: str = "") -> State[Any]:
    """Read a whole run again: check every file against its digest, every commit against its inputs, and account for
    every generated group.

    Args:
        run: Name of the run.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    from cairn.storage.upkeep.verification import verify as verified

    checks = list(verified(Ledger.open(open_store(_place(store)), run)))
    findings = [finding for check in checks for finding in check.findings]
    for finding in findings:
        get_run_logger().error(str(finding))
    files = sum(check.files for check in checks)
    if findings:
        return Failed(message=f"{len(findings)} findings in run {run}; the logs name them")
    sound = f"run {run} is intact: {files} files match their digests, and no group is trained on twice or lost"
    return Completed(message=sound)


@flow(name="gc", flow_run_name="{run}", persist_result=False)
@_served
def gc(run: RunName, apply: bool = False, store: str = "") -> State[Any]:
    """Find files of a run that nothing needs; delete them with `apply`.

    Args:
        run: Name of the run.
        apply: Delete the files.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    from cairn.configs.loader import from_manifest
    from cairn.storage.upkeep.collector import collect, garbage
    from cairn.storage.upkeep.retention import due, retire

    ledger = Ledger.open(open_store(_place(store)), run)
    keep = from_manifest(ledger.manifest.config).checkpoint
    old = retire(ledger, keep, everything=True) if apply else list(due(ledger, keep, everything=True))
    found = list(garbage(ledger))
    if apply:
        collect(ledger, found)
    for one in (*old, *found):
        get_run_logger().info(str(one))
    return Completed(message=f"{len(old) + len(found)} pieces {'removed' if apply else 'found, none removed'}")


def _name_of_evaluation() -> str:
    parameters: dict[str, Any] = flow_run.parameters
    subject = parameters.get("run") or parameters.get("model") or "nothing"
    return f"{', '.join(parameters['benchmarks'])} on {subject}"


@flow(name="evaluate", flow_run_name=_name_of_evaluation, persist_result=False)
@_served
def evaluate(
    benchmarks: Annotated[list[str], Field(min_length=1)],
    run: str = "",
    model: str = "",
    data: Sequence[str] = (),
    every: Annotated[int, Field(ge=1)] = 1,
    baseline: str = "",
    margin: Annotated[float, Field(ge=0)] = 0.0,
    fail_on_regression: bool = False,
    gate_on_regression: bool = False,
    store: str = "",
    sampling: Sampling = UNCHANGED_SAMPLING,
    engine: Engine = UNCHANGED_ENGINE,
) -> State[Any]:
    """Evaluate weights on benchmarks and store the results; stored results are not computed again.

    Args:
        benchmarks: Names of benchmarks, such as gsm8k, or YAML files.
        run: RUN, RUN@latest, RUN@ITER or RUN@A:B; a run that is training meanwhile is not disturbed.
        model: A model folder in Hugging Face format, instead of a run.
        data: Files with rows: FILE for all benchmarks, NAME=FILE for one.
        every: Of a range of iterations, each N-th.
        baseline: RUN@ITER, RUN@initial or a model folder whose results are in the store: worse scores raise an event.
        margin: By how much a score may be less than the baseline's.
        fail_on_regression: End as failed where a score is worse than the baseline's.
        gate_on_regression: Let the run wait for approval before its next iteration where a score is worse.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
        sampling: Overrides of the benchmarks' sampling options.
        engine: Overrides of the engine options of the run, or of the defaults.
    """
    from cairn.flows.evaluation.flow import evaluated

    return evaluated(
        open_store(_place(store)),
        benchmarks,
        run=run or None,
        model=model or None,
        every=every if every > 1 else None,
        data=data,
        sampling=sampling.model_dump(),
        engine=engine.model_dump(),
        baseline=baseline or None,
        margin=margin,
        fail_on_regression=fail_on_regression,
        gate_on_regression=gate_on_regression,
    )


@flow(name="rescore", flow_run_name="{run}", persist_result=False)
@_served
def rescore(run: RunName, iterations: Range = "", reward: RewardOptions = SAME_GRADER, store: str = "") -> State[Any]:
    """Grade the samples of a run again, with another grader or with the current code of its own, and report the changes
    in an artifact `rescore-<run>`. The run does not change.

    Args:
        run: Name of the run.
        iterations: One iteration, such as 39, or those from A to B, such as 0:39; empty for all.
        reward: The other grader. An empty option keeps the run's value; `rm_type` alone replaces the run's custom
            grader.
        store: Root of the ledger, a folder or s3://bucket/prefix; by default that of `cairn up`.
    """
    from cairn.flows.history.rescore import rescore as rescored

    ledger = Ledger.open(open_store(_place(store)), run)
    overrides = list(reward.overrides("reward."))
    found, _ = rescored(ledger, iterations or None, overrides, get_run_logger().info)
    create_markdown_artifact(
        key=f"rescore-{slug(run) or 'run'}",
        markdown="\n\n".join([*board_link(run), found.markdown()]),
        description=f"Rewards of {run} by {found.grader}",
    )
    return Completed(message=found.conclusion())


FLOWS: tuple[Flow[..., Any], ...] = tuple(globals()[name] for name in NAMES)
"""Flows with a deployment, each under its own name."""


def _log(event: Event, config: RunConfig) -> None:
    """Write an event to the logs of the flow run. `config`: that of the run."""
    from cairn.flows.reading.metrics import in_short, iteration_metrics

    logger = get_run_logger()
    if isinstance(event, Message):
        (logger.warning if event.level == "warning" else logger.info)(event.text)
    elif isinstance(event, RunStarted):
        verb = "continues" if event.epoch > 1 else "starts"
        logger.info(f"Run {event.run} {verb} at iteration {event.iteration} of {event.iterations}")
        if page := board_page(event.run):
            logger.info(f"Live on the board: {page}")
    elif isinstance(event, IterationDone):
        logger.info(f"Iteration {event.iteration}: {in_short(iteration_metrics(event.commits, config))}")


def _driven(store: Store, run: str, config: RunConfig | None = None, takeover: bool = False) -> State[Any]:
    """Train a run to its last iteration, or until it needs a person's decision; return the final state of the flow
    run."""
    from cairn.flows.driver.approval import Withheld
    from cairn.flows.orchestration.withheld import end_of_driver
    from cairn.flows.reading.views import run_status
    from cairn.flows.train import start_in_flow

    try:
        recorded = config or from_manifest(Ledger.open(store, run).manifest.config)
        run = start_in_flow(store, run, config, takeover, lambda event: _log(event, recorded))
    except Withheld as error:
        return end_of_driver(error, run, store.url)
    status = run_status(store, run)
    reward = "" if status.reward is None else f"reward {status.reward:.3f}, "
    return Completed(
        message=f"run {run} has its {status.num_rollout} iterations: {reward}weight version {status.weight_version}, "
        f"state digest {status.state_digest}"
    )
