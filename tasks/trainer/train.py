"""Step `train`: the optimizer updates of one iteration, exactly once.

The engine is ahead of the ledger if the driver died after the update and before the commit. If that update had exactly
the input that is to be trained now, its result is committed and nothing is trained again. An engine in any other state
is first restored to the committed weights.
"""

from cairn.engines.plan.library import folder_size as model_size
from cairn.engines.types.types import Position, TrainResult
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.batch.source import snapshot_batch
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.durable.versions import version_of
from cairn.tasks.trainer.recovery import current_position, prepare_trainer_from


@durable(
    Step.TRAIN,
    reads=("rollout.num_rollout",),  # the learning rate decays over the whole run
    externals=("model", "critic_model"),
    engines=("training",),
)
def train(
    step: StepCall,
    weights: Commit | None,
    selection: Commit,
    rollouts: list[Commit],
    advantages: Commit | None,
    scores: Commit | None,
) -> Outcome:
    """Update the weights that `weights` left, the actor's and the critic's, on the selected samples. `advantages` is
    None for a loss without advantages."""
    run, num_steps, version = step.run, step.run.config.training.num_steps_per_rollout, version_of(weights)
    batch = snapshot_batch(run, selection, rollouts, advantages, scores)
    with run.weights_lock:
        position = current_position(run)
        result = _uncommitted_result(step, position, version + num_steps)
        if result is None:
            prepare_trainer_from(run, position, weights)
            result = run.fleet.training.train(
                batch,
                num_steps=num_steps,
                expected_version=version,
                input_digest=step.input_digest,
                train_actor=run.config.algorithm.trains_actor(step.iteration),
                update_reference=run.config.algorithm.updates_reference(step.iteration),
            )
    flops = model_size(run.config.model.path).training_flops(result.lengths)
    return Outcome(
        metrics={**result.metrics, "tokens": result.tokens, "flops": flops},
        timings={"update": result.seconds},
        weight_version_in=version,
        weight_version_out=result.weight_version,
        state_digest=result.state_digest,
        environment=run.fleet.training.environment,
    )


def _uncommitted_result(step: StepCall, position: Position | None, version: int) -> TrainResult | None:
    """Return the result of exactly this step, if the engine at `position` has computed it and no driver has committed
    it."""
    if position is None or position.weight_version != version or position.last_input_digest != step.input_digest:
        return None
    step.run.emit(Message(f"Iteration {step.iteration}: the update was computed but not committed; its result is used"))
    return position.last_result
