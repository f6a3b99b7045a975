"""Step `checkpoint`: a restore point. Data cursor and buffer are its inputs by digest, so one commit holds them all."""

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.trainer.recovery import prepare_trainer


def checkpoint_due(config: RunConfig, iteration: int) -> bool:
    """Return whether the iteration ends with a restore point."""
    interval = config.checkpoint.save_interval
    last = iteration + 1 == config.rollout.num_rollout
    return last or (interval is not None and (iteration + 1) % interval == 0)


@durable(Step.CHECKPOINT, engines=("training",))
def checkpoint(step: StepCall, trained: Commit, selection: Commit) -> Outcome:
    """Save the training state that `trained` committed. `selection` fixes the cursor and the buffer."""
    run = step.run
    with run.weights_lock:
        prepare_trainer(run, trained)
        files = run.fleet.training.save(step.attempt.store.url, step.attempt.folder)
    return Outcome(
        files=[step.attempt.adopt(file) for file in files],
        values={"cursor": selection.values["cursor"]},
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
        state_digest=trained.state_digest,
        environment=run.fleet.training.environment,
    )
