"""An iteration as a trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open.

Rows are the workers: each rollout engine, the trainer, and the driver with its graders. A slice is a commit, from the
start of its step to its commit; inside it are the step's body, the writing of its files, and the commit itself. Retries
appear before it, as one slice for all failed attempts and waits, of which the ledger records the sums.

Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, JSON object format; times are
microseconds from the start of the iteration's first step.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from cairn.configs.schema.run import RunConfig
from cairn.flows.reading.costs import ON_TRAINING, ConfigOf, engine_of
from cairn.flows.reading.metrics import retries
from cairn.storage.ledger.commits import Commit, Step

TraceEvent = dict[str, Any]

_DRIVER = "driver and graders"


def trace(commits: Sequence[Commit], config_of: ConfigOf) -> dict[str, Any]:
    """Return the trace of an iteration's commits."""
    began = min(commit.started_at for commit in commits)
    rows: dict[str, list[list[Commit]]] = {}
    for commit in sorted(commits, key=lambda commit: (commit.started_at, commit.committed_at)):
        for name in _rows(commit, config_of(commit)):
            _add(rows.setdefault(name, []), commit)
    events: list[TraceEvent] = []
    for process, name in enumerate(sorted(rows, key=_place), start=1):
        events.append(_named("process_name", process, 0, name))
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for thread, lane in enumerate(rows[name], start=1):
            events.append(_named("thread_name", process, thread, name))
            for commit in lane:
                events += (event | {"pid": process, "tid": thread} for event in _slices(commit, began))
    about = {"run": commits[0].run, "iteration": commits[0].iteration, "started_at": began}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _rows(commit: Commit, config: RunConfig) -> list[str]:
    """Return the names of the rows of a commit."""
    if "engines" in commit.timings:
        return ["stream"]
    if commit.step is Step.ROLLOUT:
        return [f"rollout engine {engine_of(commit, config)}"]
    if commit.step is Step.EVAL:
        return [f"rollout engine {engine}" for engine in range(config.rollout.num_engines)]
    return ["trainer"] if commit.step in ON_TRAINING else [_DRIVER]


def _place(row: str) -> tuple[bool, bool, int]:
    """Return a sort key of a row: engines by their numbers, then the trainer, then the driver."""
    number = row.rpartition(" ")[2]
    return row == _DRIVER, row == "trainer", int(number) if number.isdecimal() else 0


def _add(lanes: list[list[Commit]], commit: Commit) -> None:
    """Add a commit to the first free lane: slices of one lane must not overlap."""
    for lane in lanes:
        if lane[-1].committed_at <= _first_try(commit):
            lane.append(commit)
            return
    lanes.append([commit])


def _slices(commit: Commit, began: float) -> Iterator[TraceEvent]:
    def piece(name: str, category: str, start: float, end: float, **args: Any) -> TraceEvent:
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "ts": round(1e6 * (start - began), 1),
            "dur": round(1e6 * max(0.0, end - start), 1),
            "args": args,
        }

    start, end = commit.started_at, commit.committed_at
    if tries := retries(commit):
        yield piece(f"{commit.step}: failed tries and waits", "retry", _first_try(commit), start, **tries)
    name = commit.name.partition("/")[2]
    yield piece(
        name,
        str(commit.step),
        start,
        end,
        attempt=commit.attempt,
        driver_epoch=commit.epoch,
        host=commit.environment.host,
        device=commit.environment.device,
        weight_version_in=commit.weight_version_in,
        weight_version_out=commit.weight_version_out,
        bytes=sum(output.bytes for output in commit.outputs),
        timings=commit.timings,
        metrics=commit.metrics,
        inputs=sorted(commit.inputs),
    )
    ran = start + commit.timings.get("run", 0.0)
    wrote = ran + commit.timings.get("write", 0.0)
    if "run" in commit.timings and wrote <= end:
        yield piece("run", "part", start, ran)
        yield piece("write", "part", ran, wrote)
        yield piece("commit", "part", wrote, end)


def _first_try(commit: Commit) -> float:
    """Return when the first attempt began, as far as the ledger knows, in Unix seconds."""
    return commit.started_at - sum(commit.timings.get(name, 0.0) for name in ("failed_tries", "retry_wait"))


def _named(kind: str, process: int, thread: int, name: str) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
