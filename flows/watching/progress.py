"""Progress of a run in the terminal: a line for each iteration and, on a terminal, a live display below.

```
[12/40] iteration 11  reward 0.523  32,104 tokens/s  1.02 s: rollout 0.31, train 0.50, other 0.21
```
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from math import inf
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cairn.configs.schema.run import RunConfig
from cairn.engines.processes.child import OUTPUT
from cairn.flows.events import Event, IterationDone, RunDone, RunStarted
from cairn.flows.reading.metrics import eval_metrics, iteration_metrics, mean_reward, spell_score, step_seconds
from cairn.flows.text import printable
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.events import Message, StepCommitted, StepStarted

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 40


class Progress:
    """Shows the driver's events. A context manager; thread-safe, because shards of a step run concurrently."""

    def __init__(self, config: RunConfig, console: Console | None = None) -> None:
        self._config = config
        self._console = console or Console()
        self._lock = threading.RLock()
        self._run = ""
        self._done = self._first = 0
        self._began = time.monotonic()
        self._working: dict[tuple[Step, str | None], float] = {}
        self._rewards: list[float] = []
        self._seconds: dict[str, float] = {}
        """Seconds of this driver's iterations, by step or `other`."""
        self._printed = _sizes()
        """Bytes of each file of what user code prints."""
        self._live = Live(get_renderable=self._foot, console=self._console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Progress":
        self._print("starting", style="dim")
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, event: Event) -> None:
        with self._lock:
            match event:
                case RunStarted():
                    self._run, self._done, self._first = event.run, event.iteration, event.iteration
                    self._began = time.monotonic()
                    verb = "continuing" if event.epoch > 1 else "starting"
                    self._print(f"run {event.run}: {verb} at iteration {event.iteration} of {event.iterations}")
                case StepStarted():
                    self._working[event.step, event.shard] = time.monotonic()
                case StepCommitted():
                    self._working.pop((event.commit.step, event.commit.shard), None)
                    self._name_outputs()
                case IterationDone():
                    self._iteration_done(event)
                case Message():
                    self._print(event.text, style="yellow" if event.level == "warning" else "dim")
                case RunDone():
                    self._print(
                        f"run {event.run}: done; weight version {event.weight_version}, state {event.state_digest}"
                        + _spell_retries(event.store_retries)
                    )

    def _iteration_done(self, event: IterationDone) -> None:
        self._done = event.iteration + 1
        metrics = iteration_metrics(event.commits, self._config)
        seconds = {str(step): spent for step, spent in step_seconds(event.commits).items()}
        seconds["other"] = metrics["perf/other_time"]
        for name, spent in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + spent
        parts = [f"[{self._done}/{self._config.rollout.num_rollout}] iteration {event.iteration}"]
        reward = mean_reward(metrics)
        if reward is not None:
            self._rewards.append(reward)
            parts.append(f"reward {self._rewards[-1]:.3f}")
        elif not self._config.samples_responses and "train/loss" in metrics:
            parts.append(f"loss {metrics['train/loss']:.3f}")
        if "rollout/response_tokens" in metrics and metrics["perf/rollout_time"]:
            parts.append(f"{metrics['rollout/response_tokens'] / metrics['perf/rollout_time']:,.0f} tokens/s")
        parts.append(f"{metrics['perf/step_time']:.2f} s: {_spell(seconds)}")
        self._print("  ".join(parts) + _spell_retries(event.store_retries))
        for trained, scores in sorted(eval_metrics(event.commits).items()):
            for benchmark in self._config.eval.benchmarks:
                if f"eval/{benchmark.name}" in scores:
                    name = f"eval/{benchmark.name}"
                    score = spell_score(
                        scores[name], scores.get(f"{name}-failed_samples"), scores.get(f"{name}-graded")
                    )
                    self._print(f"        {benchmark.name} {score} after {trained} iterations", style="bold")

    def _name_outputs(self) -> None:
        """Name each file into which user code has begun to print."""
        for file, size in _sizes().items():
            if size > self._printed.get(file, 0):
                self._print(f"code of yours prints into {file}", style="dim")
                self._printed[file] = inf

    def _print(self, text: str, style: str | None = None) -> None:
        self._console.print(printable(text), style=style, soft_wrap=True, highlight=False, markup=False)

    def _foot(self) -> RenderableType:
        with self._lock:
            total = self._config.rollout.num_rollout
            bar = Table.grid(padding=(0, 1))
            progress = ProgressBar(total, self._done, width=40)
            bar.add_row(self._run or "starting", progress, f"{self._done}/{total}", self._remaining())
            lines: list[RenderableType] = [Text(""), bar]
            now = time.monotonic()
            working = [
                f"{step}{f' {shard}' if shard else ''} {now - since:.0f} s"
                for (step, shard), since in self._working.items()
            ]
            lines.append(
                Text(f"now     {', '.join(working) or 'between steps'}", "dim", no_wrap=True, overflow="ellipsis")
            )
            if self._rewards:
                lines.append(Text(f"reward  {sparkline(self._rewards[-_SPARK_WIDTH:])} {self._rewards[-1]:.3f}"))
                whole = sum(self._seconds.values())
                shares = {name: 100 * spent / whole for name, spent in self._seconds.items() if spent >= 0.005 * whole}
                lines.append(Text("time    " + ", ".join(f"{name} {share:.0f} %" for name, share in shares.items())))
            return Group(*lines)

    def _remaining(self) -> str:
        done = self._done - self._first
        if done == 0:
            return ""
        seconds = (time.monotonic() - self._began) / done * (self._config.rollout.num_rollout - self._done)
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"


def _sizes() -> dict[Path, float]:
    """Return the bytes of each file of what user code prints."""
    with suppress(OSError):
        return {file: file.stat().st_size for file in OUTPUT.glob("*.log")}
    return {}


def sparkline(values: list[float]) -> str:
    """Return the values as a row of bars from their minimum to their maximum."""
    low, high = min(values), max(values)
    span = high - low or 1.0
    return "".join(_SPARKS[round((value - low) / span * (len(_SPARKS) - 1))] for value in values)


def _spell_retries(retries: int) -> str:
    return f"; {retries:,} store requests tried again" if retries else ""


def _spell(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {spent:.2f}" for name, spent in seconds.items())
