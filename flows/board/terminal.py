"""A run at work, seen from a second terminal: what the driver's own terminal shows, read from the ledger.

A line for each iteration; below them the state, the step, the curve and the newest sample.
"""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from cairn.flows.board.reader import RunReader
from cairn.flows.events import IterationDone, StepStarted
from cairn.flows.reading.gates import approval_request
from cairn.flows.reading.metrics import eval_metrics, iteration_metrics, mean_reward, step_seconds
from cairn.flows.reading.samples import NewestSample, newest_sample
from cairn.flows.reading.views import RunState, RunStatus
from cairn.flows.text import printable
from cairn.flows.watching.progress import Progress
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.decisions import GateState
from cairn.storage.store.errors import Damaged, Retired

INTERVAL = 0.5
"""Seconds between two looks at the run, at least."""
SHARE = 0.2
"""Share of the time that looks may take."""
EARLIER = 10
"""Number of iterations before the first look that are shown."""
_CHARACTERS = 400
"""Number of characters of a prompt or response that are shown at most."""
_GOES_ON = frozenset({RunState.NEW, RunState.RUNNING, RunState.WAITING})


class Watch(Progress):
    """Shows what was read of a run. A context manager."""

    status: RunStatus | None = None
    sample: NewestSample | None = None

    def __enter__(self) -> "Watch":
        if self._console.is_terminal:
            self._live.start()
        return self

    def begin(self, status: RunStatus, first: int) -> None:
        """Prepare for iterations from `first` on."""
        self._run, self._done, self._first = status.run, first, status.iterations
        self._began = time.monotonic()

    def take(self, status: RunStatus, sample: NewestSample | None) -> None:
        """Show the newest state."""
        with self._lock:
            before, self.status, self.sample = self.status, status, sample
            if before is not None and before.state is not status.state and status.state in _GOES_ON:
                self._print(f"run {status.run} is {status.state}")
            step = None if before is None else (before.iteration, before.step)
            if status.iteration is not None and status.step is not None and step != (status.iteration, status.step):
                self._working.clear()
                self(StepStarted(status.iteration, status.step))
            if status.state is not RunState.RUNNING:
                self._working.clear()

    def _foot(self) -> RenderableType:
        status, sample = self.status, self.sample
        if status is None:
            return Text("reading")
        lines: list[RenderableType] = [super()._foot(), Text(f"state   {status.state}")]
        if status.gate is not None and status.gate.state is GateState.OPEN:
            lines.append(Text(approval_request(status.gate, status.run), "yellow"))
        if sample is not None:
            reward = "not graded yet" if sample.reward is None else f"reward {sample.reward:.3f}"
            lines.append(Text(f"sample  iteration {sample.iteration}, group {sample.group_id}: {reward}"))
            lines += [_folded(sample.prompt, "dim"), _folded(sample.response, "")]
        return Group(*lines)


def _folded(text: str, style: str) -> RenderableType:
    """Return the end of a text without its lines, as wide as the terminal: questions and answers stand there."""
    line = " ".join(printable(text).split())
    return Padding(Text(f"{'… ' if len(line) > _CHARACTERS else ''}{line[-_CHARACTERS:]}", style), (0, 0, 0, 8))


Looked = tuple[RunStatus, list[list[Commit]], NewestSample | None]


def looks(reader: RunReader) -> Iterator[Looked]:
    """Yield the status, the commits of each iteration that is complete since the last time, and the newest sample, as
    often as something is new, until the run has no driver and needs none. Raises FileNotFoundError and StoreError."""
    shown: int | None = None
    while True:
        began = time.monotonic()
        if reader.look():
            status, ledger = reader.status, reader.ledger
            if ledger is None:
                raise Damaged(f"run {reader.run!r} is {status.state}; see `cairn verify {reader.run}`")
            shown = max(0, status.iterations - EARLIER) if shown is None else shown
            done = [commits for i in range(shown, status.iterations) if (commits := ledger.commits(i))]
            shown = max(shown, status.iterations)
            last = ledger.last_iteration()
            try:
                places = () if last is None else (last, max(0, last - 1))
                sample = next((one for place in places if (one := newest_sample(ledger, place))), None)
            except (Damaged, Retired):
                sample = None
            yield status, done, sample
            if status.state not in _GOES_ON:
                return
        time.sleep(max(INTERVAL, (time.monotonic() - began) * (1 / SHARE - 1)))


def show(reader: RunReader, console: Console | None = None) -> RunStatus:
    """Show a run until it has no driver and needs none; return its last status."""
    found = looks(reader)
    status, done, sample = next(found)
    config = reader.config
    assert config is not None
    with Watch(config, console) as watch:
        watch.begin(status, status.iterations - len(done))
        while True:
            for commits in done:
                watch(IterationDone(commits[0].iteration, tuple(commits)))
            watch.take(status, sample)
            following = next(found, None)
            if following is None:
                return status
            status, done, sample = following


def lines(reader: RunReader) -> Iterator[dict[str, Any]]:
    """Yield the same as JSON values: one for each iteration, and one for each change of the state or step."""
    for status, done, sample in looks(reader):
        assert reader.ledger is not None
        for commits in done:
            metrics = _known(iteration_metrics(commits, reader.ledger.config_of(*commits)))
            yield {
                "run": status.run,
                "iteration": commits[0].iteration,
                "reward": mean_reward(metrics),
                "loss": metrics.get("train/loss"),
                "seconds": {"all": metrics["perf/step_time"], **{str(k): v for k, v in step_seconds(commits).items()}},
                "metrics": metrics,
                "evaluations": {trained: _known(scores) for trained, scores in eval_metrics(commits).items()},
            }
        yield {
            "run": status.run,
            "state": status.state,
            "iterations": status.iterations,
            "num_rollout": status.num_rollout,
            "step": status.step,
            "failure": None if status.failure is None else status.failure.model_dump(mode="json"),
            "sample": None if sample is None else sample.model_dump(mode="json"),
        }


def _known(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics that JSON can hold: without NaN and infinities."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
