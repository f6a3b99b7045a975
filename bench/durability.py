"""What durability costs an iteration: a durable run and the same engines in a bare loop, in turns in one process.

    python -m bench.durability [RECIPE] [--set a.b=c] [--iterations 20] [--smoke] [--json FILE]

After every five iterations of the durable run (Prefect flow and tasks, Ray actors, Parquet snapshots, commits) it is
held, and the bare loop of `bench/bare_loop.py` does the same five: the same prompts, samples and updates, which the
equal state digest at the end proves. What Prefect does beside the steps, such as ending the flow run before and making
the next, so falls on the durable run. The difference is split by cause:

    Prefect    what passes from an iteration's first step to the next one's while no step is at work
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
from cairn.flows.events import Event, RunDone, StepCommitted, StepStarted
from cairn.flows.reading.metrics import step_seconds
from cairn.flows.train import start
from cairn.storage.commits import Commit, Step
from cairn.storage.store import open_for_runs

TURN = 5
"""Iterations after which the other side has its turn. Those of the first turn do not count."""


class SideBySide:
    """Takes the durable run's events, and holds the run while the bare loop does the same iterations."""

    def __init__(self, config: RunConfig) -> None:
        self._bare = BareLoop(config)
        self._telling = threading.Lock()
        self._steps: dict[int, list[StepCommitted]] = defaultdict(list)
        self._walls: dict[int, float] = {}
        self._began = 0.0
        self._newest = -1
        self.milliseconds: dict[str, list[float]] = defaultdict(list)
        self.snapshot_bytes = self.tokens = 0
        self.state_digests: set[str] = set()

    def __call__(self, event: Event) -> None:
        with self._telling:
            if isinstance(event, StepStarted) and event.iteration > self._newest:
                self._end_iteration()
                if event.iteration % TURN == 0:
                    self._take_turn()
                self._newest, self._began = event.iteration, time.perf_counter()
            elif isinstance(event, StepCommitted):
                self._steps[event.commit.iteration].append(event)
            elif isinstance(event, RunDone):
                self._end_iteration()
                self._take_turn()
                self.state_digests = {event.state_digest, self._bare.trainer.state_digest()}
                self._bare.close()

    def _end_iteration(self) -> None:
        if self._newest >= 0:
            self._walls[self._newest] = time.perf_counter() - self._began

    def _take_turn(self) -> None:
        for index, wall in self._walls.items():
            bare = sum(self._bare.iterate(index).seconds.values())
            say(f"iteration {index}: {wall:.2f} s, in the bare loop {bare:.2f} s")
            if index >= TURN:
                self._add(wall, bare, self._steps.pop(index))
        self._walls.clear()

    def _add(self, wall: float, bare: float, committed: list[StepCommitted]) -> None:
        events = [event for event in committed if event.commit.step not in (Step.EVAL, Step.CHECKPOINT)]
        commits, steps = [event.commit for event in committed], [event.commit for event in events]
        other = sum(seconds for step, seconds in step_seconds(commits).items() if step in (Step.EVAL, Step.CHECKPOINT))
        wall -= other
        files = _slowest_shard(steps, {c.name: c.timings["write"] for c in steps})
        in_commits = {e.commit.name: e.seconds - e.commit.timings["run"] - e.commit.timings["write"] for e in events}
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
    """Sum over steps; shards of a step work at the same time."""
    by_step: dict[Step, float] = defaultdict(float)
    for commit in commits:
        by_step[commit.step] = max(by_step[commit.step], seconds[commit.name])
    return sum(by_step.values())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="configs/recipes/quickstart.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override an option")
    parser.add_argument("--iterations", type=int, default=30, help="iterations, the first five of which do not count")
    arguments = parse(parser, iterations=TURN + 1)
    small = SMALL_RUN if arguments.smoke else ()
    overrides = [f"rollout.num_rollout={arguments.iterations}", "tracking.tensorboard_dir=null", *small, *arguments.set]
    config = load(arguments.recipe, overrides)
    side_by_side = SideBySide(config)
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
