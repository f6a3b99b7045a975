"""Step `sync`: publish the new weights. Every rollout engine fetches them when it needs them.

An engine's weights are verified, not remembered: before it generates, it is queried, and only an engine that is behind
is updated.
"""

from collections.abc import Collection
from typing import Any

from cairn.engines.types.errors import PublicationGone, WeightsDiffer
from cairn.engines.types.types import Publication
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.trainer.recovery import restore_trainer


@durable(Step.SYNC, reads=("rollout.dtype",), engines=("training",))  # the digest is of the weights in that dtype
def sync(step: StepCall, trained: Commit) -> Outcome:
    """Publish the weights that `trained` committed, and commit the digest that engines must find."""
    publication = publish(step.run, trained)
    return Outcome(
        values={"digest": publication.digest},
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
    )


def publish(run: RunContext, weights: Commit | None) -> Publication:
    """Publish the weights that `weights` committed; None means the initial ones. A trainer in another state is restored
    to these weights first."""
    with run.weights_lock:
        restore_trainer(run, weights)
        return run.fleet.weights.publish(version_of(weights), keep=run.ledger.lag + 2)


def update(run: RunContext, engine: Any, weights: Commit | None) -> float:
    """Update an engine of `run.fleet.rollout` during generation to the weights that `weights` committed. Return the
    seconds without decoding. Raises EngineError."""
    seconds: float = run.fleet.weights.update(engine, version_of(weights))
    return seconds


def serve(run: RunContext, engine: Any, weights: Commit | None, beside: Collection[Any] = ()) -> None:
    """Have an engine of `run.fleet.rollout` serve the weights that `weights` committed, and those `beside` it that are
    to serve them next, where they are idle: all of them are sent the weights at once.

    The weights are published again if the engine needs them and their publication is gone, was not yet made by this
    driver, or differs from what was published. Raises PublicationGone where another half learns meanwhile: the training
    engine is ahead, and does not go back.
    """
    version = version_of(weights)
    try:
        run.fleet.weights.serve(engine, version, beside)
    except (PublicationGone, WeightsDiffer) as error:
        if run.side_by_side:
            why = "is not published any more" if isinstance(error, PublicationGone) else f"was dropped ({error})"
            raise PublicationGone(
                f"weight version {version} {why}, and the training engine is ahead of it: run `cairn resume` to "
                "publish it again"
            ) from error
        with run.weights_lock:  # another thread may have published it meanwhile
            if version not in run.fleet.weights.published():
                publish(run, weights)
        run.fleet.weights.serve(engine, version, beside)
