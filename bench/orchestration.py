"""Cost of Prefect for an iteration: eight no-op steps, called directly and as flow runs of an embedded server.

    python -m bench.orchestration [--rounds 20] [--pause 0] [--home DIR] [--smoke] [--json FILE]

  direct   the steps, called one after the other: the baseline.
  tasks    the same as Prefect tasks of the driver's flow run: no separate graph for each iteration.
  subflow  what `train` does: those tasks inside `cairn.flows.orchestration.flow_runs.subflow`, on the embedded server.
  pages    the same and the run's pages, until Prefect has them; the next iteration need not wait for that.
  plain    a flow and tasks as Prefect's decorators create them, on the same server.

Each round runs every shape once in rotating order, so that other load of the machine affects all alike; the first round
is not counted. Iterations follow each other at once, or after `--pause` seconds, in which the server processes the
events of the previous one.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import prefect
import pyarrow as pa
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
from rich.console import Console
from rich.table import Table

from bench.command import parse, say
from cairn.configs.schema.operations import RetryConfig
from cairn.flows.events import IterationDone, RunStarted
from cairn.flows.orchestration.artifacts.publishing import Pages
from cairn.flows.orchestration.flow_runs import PrefectSteps, driving, silence_console, subflow
from cairn.flows.orchestration.server import prefect_api
from cairn.flows.watching.watchers import Watchers
from cairn.storage.ledger.commits import Commit, OutputFile, Step
from cairn.storage.ledger.snapshots import read_table
from cairn.storage.records import Environment
from cairn.tasks.durable.events import StepCommitted, StepStarted
from cairn.tasks.durable.retries import RetryTally
from tests.flows.written_runs import config_of, new_run, write_iteration

STEPS = [step for step in Step if step is not Step.EVAL]


@dataclass
class Shape:
    """A way to run an iteration, and its measurements."""

    name: str
    run: Callable[[int], object]
    milliseconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


@dataclass(frozen=True)
class NoOp:
    """A step that does nothing; its commit is as large as a real one."""

    name: Step

    def body(self) -> None:
        """Do nothing."""

    def __call__(self, run: object, index: int, shard: str | None, *inputs: Commit) -> Commit:
        return Commit(
            run="bench",
            iteration=index,
            step=self.name,
            shard=shard,
            attempt="000001-0123456789abcdef",
            epoch=1,
            inputs={commit.name: "0" * 64 for commit in inputs},
            config_digest="0" * 64,
            outputs=(OutputFile(path="iterations/000000/file.parquet", bytes=1, rows=1, sha256="0" * 64),),
            values={"cursor": 0, "missing": 0, "full": True},
            metrics={f"metric/{number}": 0.0 for number in range(10)},
            timings={"run": 0.0, "write": 0.0},
            started_at=0.0,
            committed_at=0.0,
            environment=Environment(device="cpu", threads=1, versions={"torch": "2.13.0"}),
        )


def one_iteration(call: Callable[..., Commit], index: int) -> None:
    """Execute every step in order; each reads the results of the two before it."""
    made: list[Commit] = []
    for name in STEPS:
        made.append(call(NoOp(name), index, None, *made[-2:]))


def call_directly(step: NoOp, index: int, shard: str | None, *inputs: Commit) -> Commit:
    return step(None, index, shard, *inputs)


@prefect.task(name="plain")
def plain_task(step: NoOp, index: int, shard: str | None, *inputs: Commit) -> Commit:
    return step(None, index, shard, *inputs)


@prefect.flow(name="plain")
def plain_iteration(index: int) -> None:
    one_iteration(plain_task, index)


def watched_run(folder: str) -> tuple[SimpleNamespace, tuple[Commit, ...]]:
    """Return the parts of a run that pages read, and an iteration of six samples."""
    ledger = new_run(f"{folder}/store", rollout={"num_rollout": 100_000})
    write_iteration(ledger, 0)

    def read(commit: Commit, columns: Sequence[str]) -> pa.Table:
        return read_table(ledger.store, commit.run, commit.outputs[0], list(columns))

    run = SimpleNamespace(ledger=ledger, config=config_of(ledger), read=read, emit=say)
    return run, tuple(ledger.commits(0))


@prefect.flow(name="bench", persist_result=False)
def measure(rounds: int, pause: float, folder: str) -> list[Shape]:
    """Run all shapes in every round, and return them with their measurements."""
    with driving("bench", tempfile.gettempdir()) as tags:
        run = SimpleNamespace(retries=RetryTally(RetryConfig()), stopping=threading.Event())
        call = PrefectSteps(cast(Any, run)).call
        own_flow = subflow(
            lambda index: one_iteration(call, index), name="iteration", run_name="bench {index:06d}", tags=tags
        )
        context, commits = watched_run(folder)
        watchers = Watchers(lambda event: None)

        def step_with_events(step: NoOp, index: int, shard: str | None, *inputs: Commit) -> Commit:
            watchers(StepStarted(index, step.name, shard))
            commit = call(cast(Any, step), index, shard, *inputs)
            watchers(StepCommitted(commit))
            return commit

        watched = subflow(
            lambda index: one_iteration(step_with_events, index), name="iteration", run_name="watched", tags=tags
        )

        def with_pages(index: int) -> None:
            watched(index)
            watchers(IterationDone(index, commits))
            watchers.settle()

        shapes = [
            Shape("direct", lambda index: one_iteration(call_directly, index)),
            Shape("tasks", lambda index: one_iteration(call, index)),
            Shape("subflow", own_flow),
            Shape("pages", with_pages),
            Shape("plain", plain_iteration),
        ]
        with watchers.attached({"pages": Pages(cast(Any, context))}):
            watchers(RunStarted("toy", 1, 0, 100_000))
            watchers.settle()
            for turn in range(rounds + 1):
                say(f"turn {turn} of {rounds}")
                first = turn % len(shapes)
                for shape in shapes[first:] + shapes[:first]:
                    heartbeat = 180 if shape.name == "plain" else None
                    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: heartbeat}):
                        began = time.perf_counter()
                        shape.run(turn)
                        if turn:
                            shape.milliseconds.append(1e3 * (time.perf_counter() - began))
                    time.sleep(pause)
    return shapes


def show(shapes: Sequence[Shape]) -> None:
    """Print the table."""
    table = Table("shape", "median ms", "min", "max", "over direct", title=f"{len(STEPS)} no-op steps")
    for shape in shapes:
        times = shape.milliseconds
        over = shape.median - shapes[0].median
        table.add_row(shape.name, *(f"{number:.1f}" for number in (shape.median, min(times), max(times), over)))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--home", type=Path, help="folder of the server's database; a temporary one by default")
    arguments = parse(parser, rounds=1)
    silence_console()
    with tempfile.TemporaryDirectory() as folder, prefect_api(arguments.home or Path(folder)):
        shapes = measure(arguments.rounds, arguments.pause, folder)
        show(shapes)
    if arguments.json:
        results = {shape.name: [round(time, 2) for time in shape.milliseconds] for shape in shapes}
        arguments.json.write_text(json.dumps({"pause": arguments.pause, "milliseconds": results}, indent=1))


if __name__ == "__main__":
    main()
