"""`sync`: the new weights are published, where every rollout engine fetches them when it needs them.

Which weights an engine has is verified, not remembered: before it generates it is asked, and brought up to date by
itself alone where it is behind.
"""

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
    """Publish the weights that `trained` committed; commit the digest that engines must find."""
    publication = publish(step.run, trained)
    return Outcome(
        values={"digest": publication.digest},
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
    )


def publish(run: RunContext, weights: Commit | None) -> Publication:
    """Publish the weights that `weights` committed, None for the initial ones; the trainer is brought there if it is
    elsewhere."""
    with run.weights_lock:
        restore_trainer(run, weights)
        return run.fleet.publish(version_of(weights), keep=run.ledger.lag + 2)


def update(run: RunContext, engine: Any, weights: Commit | None) -> float:
    """Have an engine of `run.fleet.rollout` go on, with what it generates, with the weights that `weights` committed.
    Returns for how many seconds it decoded nothing. Raises EngineError."""
    seconds: float = run.fleet.update(engine, version_of(weights))
    return seconds


def serve(run: RunContext, engine: Any, weights: Commit | None) -> None:
    """Have an engine of `run.fleet.rollout` serve the weights that `weights` committed. They are published again where
    the engine needs them and they are not there any more, not yet in this driver, or not what was published.

    Raises PublicationGone where another half learns meanwhile: the training engine is ahead, and does not go back.
    """
    version = version_of(weights)
    try:
        run.fleet.serve(engine, version)
    except (PublicationGone, WeightsDiffer) as error:
        if run.side_by_side:
            why = "is not published any more" if isinstance(error, PublicationGone) else f"was dropped ({error})"
            raise PublicationGone(
                f"weight version {version} {why}, and the training engine is ahead of it: `cairn resume` publishes it "
                "again"
            ) from error
        with run.weights_lock:  # who waited for it finds what the other one published
            if version not in run.fleet.published():
                publish(run, weights)
        run.fleet.serve(engine, version)
