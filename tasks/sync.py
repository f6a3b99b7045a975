"""`sync`: every rollout engine serves the new weights, and says so."""

import time

from cairn.storage.commits import Commit, Step
from cairn.tasks.context import RunContext
from cairn.tasks.recovery import restore_trainer, version_of
from cairn.tasks.step import Outcome, StepCall, durable


@durable(Step.SYNC, reads=("rollout.num_engines",), engines=("rollout", "training"))
def sync(step: StepCall, trained: Commit) -> Outcome:
    """Bring the rollout engines to the weights that `trained` committed; commit the versions they report."""
    versions = bring_up_to_date(step.run, trained)
    return Outcome(
        values={"versions": versions},
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
    )


def bring_up_to_date(run: RunContext, weights: Commit | None) -> list[int]:
    """Ask every rollout engine for its weight version and update those that are not at `weights`.

    Sync is verified, not remembered: an engine that was restarted since the last sync step is found here. Shards that
    ask at the same time share an answer: who waited for another's turn takes what that found out, if it began to ask
    later and nobody has touched the engines since.
    """
    asked, version = time.monotonic(), version_of(weights)
    with run.weights_lock as lock:
        turn, began, checked = run.checked
        if (turn, checked) == (lock.turn - 1, version) and began > asked:
            run.checked = lock.turn, began, version
            return [version] * len(run.fleet.rollout)
        began = time.monotonic()
        run.fleet.turns.offload_training()
        run.fleet.ensure_rollout_alive()
        reported = run.fleet.rollout_versions()
        if any(found != version for found in reported):
            restore_trainer(run, weights)
            run.fleet.sync_weights()
        run.fleet.turns.for_rollout()
        run.fleet.route()
        if lock.depth == 1:  # else more is done in this turn
            run.checked = lock.turn, began, version
        return [version] * len(reported)
