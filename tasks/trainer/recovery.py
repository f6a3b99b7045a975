"""Restoring of the training engine to a committed state: from its own state, or from the newest checkpoint.

the engine's state               action
the wanted state                 none
a committed state before it      the newest checkpoint between the two is loaded, if there is one; the committed
                                 train steps after it are replayed from their snapshots, each checked against its
                                 digest
anything else                    the engine is discarded: a restart brings it to the initial weights, and then the
                                 case above applies
"""

import time

from cairn.configs.engines import layout_changes
from cairn.configs.errors import Failure
from cairn.configs.schema.run import RunConfig
from cairn.engines.types.errors import ClusterLost, EngineDied, EngineError, EngineTimeout
from cairn.engines.types.types import Position
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.redacted import redacted_samples
from cairn.storage.store.errors import Redacted
from cairn.storage.upkeep.retention import newest_checkpoint
from cairn.tasks.batch.source import SnapshotBatch, snapshot_batch
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.events import Message
from cairn.tasks.durable.step import input_digest
from cairn.tasks.durable.versions import sampled_from, version_of


class ReplayDiverged(Failure):
    """Error: the replay of a committed train step from its snapshot gave another state. The ledger was not changed."""


def current_position(run: RunContext) -> Position | None:
    """Return the position of the training engine; None where it cannot report one, after a restart or in the middle of
    a step."""
    try:
        return run.fleet.training.living_position()
    except (EngineDied, EngineTimeout, ClusterLost):
        raise
    except EngineError as error:
        run.emit(Message(f"The training engine is discarded: {error}", "warning"))
        return None


def prepare_trainer(run: RunContext, weights: Commit | None) -> None:
    """Make the training engine ready to work from the state that `weights` committed; see `restore_trainer`."""
    prepare_trainer_from(run, current_position(run), weights)


def prepare_trainer_from(run: RunContext, position: Position | None, weights: Commit | None) -> None:
    """Do the same as `prepare_trainer` for a caller that has the engine's position and exclusive use of it since."""
    _restore_from(run, position, weights)
    run.fleet.turns.for_training()


def restore_trainer(run: RunContext, weights: Commit | None) -> None:
    """Restore the training engine to exactly the state that `weights` committed; None means the initial weights. An
    engine in that state is left unchanged, whether its memory is offloaded or not.

    Callers hold `run.weights_lock`. Raises ReplayDiverged, Damaged, and EngineError where a retry may help.
    """
    _restore_from(run, current_position(run), weights)


def _restore_from(run: RunContext, position: Position | None, weights: Commit | None) -> None:
    version = version_of(weights)
    if position is not None and position.weight_version == version:
        if weights is None or position.state_digest == weights.state_digest:
            return
        run.emit(Message("The training engine has another state than the ledger; its state is discarded", "warning"))
    target = -1 if weights is None else weights.iteration
    saved = newest_checkpoint(run.ledger, target)
    begin = -1 if saved is None else saved.iteration
    current = _current_iteration(run, position)
    if current is None or current > target:
        run.fleet.training.restart()
        current = -1
    run.fleet.turns.for_training()
    origin = "the initial weights" if current < 0 else f"iteration {current}"
    if saved is not None and current < begin:
        size = sum(output.bytes for output in saved.outputs)
        run.fleet.training.load(run.ledger.store.url, run.ledger.folder_of(saved), size)
        _require_state(saved, run.fleet.training.position().state_digest)
        current, origin = begin, f"the checkpoint of iteration {begin}"
    todo = target - current
    if saved is not None or todo:
        run.emit(Message(f"Restoring weight version {version} from {origin}; {todo} committed step(s) to replay"))
    for iteration in range(current + 1, target + 1):
        replay(run, run.committed(iteration, Step.TRAIN))


def _current_iteration(run: RunContext, position: Position | None) -> int | None:
    """Return the iteration that left exactly the training engine's state, -1 for the initial state; None where none
    did."""
    if position is None:
        return None
    if position.weight_version == 0:
        return -1 if position.last_input_digest is None else None
    try:
        iteration = sampled_from(run.ledger, position.weight_version) - 1
    except ValueError:
        return None
    trained = run.find(iteration, Step.TRAIN)
    return iteration if trained is not None and trained.state_digest == position.state_digest else None


def replay(run: RunContext, committed: Commit) -> None:
    """Replay a committed train step on the engine, from its snapshots. Raises ReplayDiverged for another state
    digest."""
    require_unredacted(run, committed)
    made = run.config_of(committed)
    if changes := layout_differences(made, run.whole_config):
        raise ReplayDiverged(
            f"{committed.name} was made in another layout ({changes}), so a replay in this one has other bits, and "
            "there is no checkpoint after it to begin from"
        )
    run = run.seen_as(made)  # the view of the replayed step, not that of the caller
    assert committed.weight_version_in is not None
    began = time.perf_counter()
    result = run.fleet.training.train(
        committed_batch(run, committed),
        num_steps=run.config.training.num_steps_per_rollout,
        expected_version=committed.weight_version_in,
        input_digest=input_digest(committed.inputs, committed.config_digest),
        train_actor=run.config.algorithm.trains_actor(committed.iteration),
        update_reference=run.config.algorithm.updates_reference(committed.iteration),
    )
    _require_state(committed, result.state_digest)
    run.replays.add(time.perf_counter() - began)


def layout_differences(then: RunConfig, now: RunConfig, within: str = "training.") -> str:
    """Return how the layouts of two configurations differ, as words; empty where they do not. By default those of the
    training engine, whose updates have other bits in another one."""
    changes = {} if then is now else layout_changes(then.model_dump(mode="json"), now.model_dump(mode="json"))
    own = {name: both for name, both in changes.items() if name.startswith(within)}
    return ", ".join(f"{name} {before} then, {after} now" for name, (before, after) in own.items())


def require_unredacted(run: RunContext, committed: Commit) -> None:
    """Raise Redacted if a step was made from samples of which some have been redacted."""
    redacted = redacted_samples(run.ledger)
    for name in committed.inputs:
        if name in redacted:
            raise Redacted(
                f"{committed.name} cannot be repeated: decision {redacted[name]} has redacted samples of its input "
                f"{name}"
            )


def committed_batch(run: RunContext, committed: Commit) -> SnapshotBatch:
    """Return exactly the batch that a train step was committed for, from its snapshots."""
    inputs = [run.input_commit(committed, name) for name in committed.inputs if "/" in name]
    by_step = {commit.step: commit for commit in inputs if commit.iteration == committed.iteration}
    rollouts = [commit for commit in inputs if commit.step == Step.ROLLOUT]
    return snapshot_batch(run, by_step[Step.FILTER], rollouts, by_step.get(Step.ADVANTAGE), by_step.get(Step.SCORE))


def _require_state(commit: Commit, digest: str) -> None:
    if digest != commit.state_digest:
        raise ReplayDiverged(
            f"{commit.name}: expected state digest {commit.state_digest}, found {digest}. Equal weights need the "
            "machine type, thread count and package versions of the commit's environment; see docs/recovery.md"
        )
