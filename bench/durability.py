"""Cost of durability for an iteration: a durable run and the same engines in a bare loop, alternating in one process.

    python -m bench.durability [RECIPE] [--set a.b=c] [--iterations 20] [--smoke] [--json FILE]

After each iteration of the durable run (Prefect flow and tasks, Ray actors, Parquet snapshots, commits) the bare loop
of `bench/bare_loop.py` does the same iteration: the same prompts, samples and updates, as the equal state digest at the
end proves. The difference is split by cause:

    Prefect    time of an iteration in which no step is running
    files      encoding tables, writing them, fsync
    commits    lease check, exclusive create, fsync
    Ray        the rest of the steps' time beyond the bare loop's: actor calls, batches and weights through shared
               memory, building tables, filtering groups, the trainer's check of its own position
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict

from rich.console import Console
from rich.table import Table

from bench.bare_loop import BareLoop
from bench.command import SMALL_RUN, parse, say
from cairn.configs.loader import load
from cairn.configs.schema.run import RunConfig
from cairn.flows.events import Event, IterationDone, RunDone
from cairn.flows.reading.metrics import step_seconds
from cairn.flows.train import start
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.opening import open_for_runs
from cairn.tasks.durable.events import StepCommitted, StepStarted

WARM_UP = 3
"""Number of first iterations that are not counted."""


class BareLoopComparison:
    """Receives the durable run's events, and repeats each completed iteration in the bare loop."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._bare = BareLoop(config)
        self._step_seconds: dict[str, float] = {}
        self._began = time.perf_counter()
        self._turns = threading.Condition()
        self._done = -1
        """Newest iteration that the bare loop has completed too."""
        self._ended: dict[int, float] = {}
        """Time of the first step of the next iteration, by iteration."""
        self.milliseconds: dict[str, list[float]] = defaultdict(list)
        self.snapshot_bytes = self.tokens = 0
        self.state_digests: set[str] = set()

    def __call__(self, event: Event) -> None:
        if isinstance(event, StepStarted):
            self._wait_for_turn(event.iteration)
        elif isinstance(event, StepCommitted):
            self._step_seconds[event.commit.name] = event.seconds
        elif isinstance(event, IterationDone):
            wall = self._end_of(event.iteration) - self._began
            bare = self._bare.iterate(event.iteration)
            say(f"iteration {event.iteration}: {wall:.1f} s, in the bare loop {sum(bare.seconds.values()):.1f} s")
            if event.iteration >= WARM_UP:
                self._add(wall, event.commits, sum(bare.seconds.values()))
            with self._turns:
                self._began, self._done = time.perf_counter(), event.iteration
                self._turns.notify_all()
        elif isinstance(event, RunDone):
            self.state_digests = {event.state_digest, self._bare.trainer.state_digest()}
            self._bare.close()

    def _wait_for_turn(self, iteration: int) -> None:
        """Wait until the bare loop has completed the previous iteration. Called before each step, in the iteration's
        own thread, which is created ahead."""
        with self._turns:
            self._ended.setdefault(iteration - 1, time.perf_counter())
            self._turns.notify_all()
            self._turns.wait_for(lambda: self._done >= iteration - 1)

    def _end_of(self, iteration: int) -> float:
        """Return the end of an iteration: the next one begins when the flow run of this one is about to end; nothing
        begins after the last."""
        if iteration + 1 == self._config.rollout.num_rollout:
            return time.perf_counter()
        with self._turns:
            self._turns.wait_for(lambda: iteration in self._ended)
            return self._ended[iteration]

    def _add(self, wall: float, commits: tuple[Commit, ...], bare: float) -> None:
        steps = [commit for commit in commits if commit.step not in (Step.EVAL, Step.CHECKPOINT)]
        other = sum(seconds for step, seconds in step_seconds(commits).items() if step in (Step.EVAL, Step.CHECKPOINT))
        wall -= other
        files = _slowest_shard(steps, {c.name: c.timings["write"] for c in steps})
        in_commits = {c.name: self._step_seconds[c.name] - c.timings["run"] - c.timings["write"] for c in steps}
        marked = _slowest_shard(steps, in_commits)
        prefect = wall - sum(step_seconds(steps).values())
        found = {
            "durable": wall,
            "bare": bare,
            "Prefect": prefect,
            "files": files,
            "commits": marked,
            "Ray": wall - bare - prefect - files - marked,
        }
        for name, seconds in found.items():
            self.milliseconds[name].append(seconds * 1000)
        self.snapshot_bytes += sum(output.bytes for commit in steps for output in commit.outputs)
        self.tokens += sum(int(c.metrics["response_tokens"]) for c in steps if c.step is Step.ROLLOUT)


def _slowest_shard(commits: list[Commit], seconds: dict[str, float]) -> float:
    """Return the sum over steps of the slowest shard's seconds, because shards of a step run concurrently."""
    by_step: dict[Step, float] = defaultdict(float)
    for commit in commits:
        by_step[commit.step] = max(by_step[commit.step], seconds[commit.name])
    return sum(by_step.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--iterations", type=int, default=20, help="iterations, the first three of which do not count")
    arguments = parse(parser, iterations=WARM_UP + 1)
    small = SMALL_RUN if arguments.smoke else ()
    overrides = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *small, *arguments.set]
    config = load(arguments.recipe, overrides)
    side_by_side = BareLoopComparison(config)
    with tempfile.TemporaryDirectory() as folder:
        start(open_for_runs(folder), "durable", config, on_event=side_by_side)
    found = {name: statistics.median(values) for name, values in side_by_side.milliseconds.items()}
    table = Table("", "median ms an iteration", "range")
    for name, values in side_by_side.milliseconds.items():
        table.add_row(name, f"{found[name]:.0f}", f"{min(values):.0f} – {max(values):.0f}")
    console = Console()
    console.print(table)
    per_token = side_by_side.snapshot_bytes / side_by_side.tokens
    console.print(
        f"durability costs {found['durable'] - found['bare']:.0f} ms an iteration, "
        f"{found['durable'] / found['bare']:.2f} × the bare loop; snapshots {per_token:.1f} bytes a token; "
        f"final states {'equal' if len(side_by_side.state_digests) == 1 else 'DIFFER'}"
    )
    if arguments.json is not None:
        milliseconds = dict(side_by_side.milliseconds)
        arguments.json.write_text(json.dumps({"milliseconds": milliseconds, "bytes_per_token": per_token}, indent=1))


if __name__ == "__main__":
    main()
