"""`sync`: every rollout engine serves the new weights, and says so."""

from storage.commits import Commit, Step
from tasks.context import RunContext
from tasks.recovery import restore_trainer, version_of
from tasks.step import Outcome, StepCall, durable


@durable(Step.SYNC, reads=("rollout.num_engines",))
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

    Sync is verified, not remembered: an engine that was restarted since the last sync step is found here.
    """
    version = version_of(weights)
    with run.weights_lock:
        run.fleet.turns.offload_training()
        run.fleet.ensure_rollout_alive()
        reported = run.fleet.rollout_versions()
        if any(found != version for found in reported):
            restore_trainer(run, weights)
            run.fleet.sync_weights()
        run.fleet.turns.for_rollout()
        run.fleet.route()
        return [version] * len(reported)
