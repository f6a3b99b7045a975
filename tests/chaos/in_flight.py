"""Bringing a driver to an update of weights in flight, so that a fault can strike between its beginning and its end.

Such an update needs an engine that is at work, which is a matter of milliseconds with a tiny model. So the prompts
after those of the iteration are admitted when its weights are about to be published, and these are published when an
engine is at work on the prompts. Nobody strikes an engine that was too fast all the same.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

from cairn.engines.fleet.rollout import RolloutHandle
from cairn.flows import pipeline
from cairn.flows.step_runner import StepRunner
from cairn.storage.ledger.commits import Commit
from cairn.tasks.durable.context import RunContext
from cairn.tasks.streaming import engine_work
from cairn.tasks.streaming.stream import Stream

INTO_THE_WORK = 0.05
"""Seconds for which an engine has been asked for samples when weights are published."""


def watch_updates(
    awaited: Callable[[int], bool], strike: Callable[[int, RolloutHandle], None], patience: float
) -> None:
    """From now on, have updates in flight of the iterations for which one is `awaited`, for which nobody waits longer
    than `patience` seconds, and `strike` when any has begun: with its iteration, and the engine."""
    publish, admit, call, update = Stream.publish, pipeline.admit, RolloutHandle.call, engine_work.update
    changed, published = threading.Condition(), -1
    updated = threading.local()

    def publishing(stream: Stream, weights: Commit | None) -> None:
        nonlocal published
        assert weights is not None
        if awaited(weights.iteration):
            with changed:
                published = weights.iteration
                changed.notify_all()
            with stream._changed:
                stream._changed.wait_for(lambda: any(engine._ready for engine in stream._engines), patience)
            time.sleep(INTO_THE_WORK)
        publish(stream, weights)

    def admitting(run: RunContext, steps: StepRunner, index: int) -> list[Commit]:
        if awaited(index - 1):
            with changed:
                changed.wait_for(lambda: published >= index - 1, patience)
        return admit(run, steps, index)

    def updating(run: RunContext, engine: Any, weights: Commit) -> float:
        updated.iteration = weights.iteration
        return update(run, engine, weights)

    def calling(engine: RolloutHandle, group: str | None, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        answer = call(engine, group, method, *args, **named)
        if method.__name__ == "begin_weight_update" and named.get("in_flight"):
            strike(updated.iteration, engine)
        return answer

    Stream.publish, RolloutHandle.call = publishing, calling  # type: ignore[method-assign]
    pipeline.admit, engine_work.update = admitting, updating  # type: ignore[attr-defined, assignment]
