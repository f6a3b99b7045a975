"""Step `checkpoint`: a restore point. Data cursor and buffer are its inputs by digest, so one commit holds them all.

Training waits only while the ranks begin to copy the state to the memory of their machines. The passes of the next
update run beside the copy, and its first optimizer step waits for the end of it:

    learn of i     train ─▶ copy ─▶ sync
    learn of i+1            │                train …
    checkpoint of i         └─▶ write, upload ───────▶ commit

A driver that dies before the commit leaves no restore point: recovery starts from the one before it.
"""

import time
from threading import Event, Lock

from cairn.configs.schema.run import RunConfig
from cairn.storage.ledger.commits import Commit, Step
from cairn.tasks.durable.context import RunContext
from cairn.tasks.durable.step import Outcome, StepCall, durable
from cairn.tasks.trainer.recovery import prepare_trainer


class Copies:
    """Events that steps `checkpoint` and `sync` set when they have copied what they write. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._events: dict[tuple[Step, int], Event] = {}
        self.newest: int | None = None
        """Iteration of the newest checkpoint that this driver has begun."""

    def expect(self, step: Step, iteration: int) -> Event:
        """Return the event of an iteration, which is set by its step."""
        with self._lock:
            if step is Step.CHECKPOINT:
                self.newest = iteration
            return self._events.setdefault((step, iteration), Event())

    def made(self, step: Step, iteration: int) -> bool:
        """Set the event of an iteration. Return whether anyone expects it."""
        with self._lock:
            event = self._events.pop((step, iteration), None)
        if event is not None:
            event.set()
        return event is not None


def copies_of(run: RunContext) -> Copies:
    """Return the run's copies."""
    if (copies := run.attached(Copies)) is None:
        run.attach(copies := Copies())
    return copies


def checkpoint_due(config: RunConfig, iteration: int) -> bool:
    """Return whether the iteration ends with a restore point."""
    interval = config.checkpoint.save_interval
    last = iteration + 1 == config.rollout.num_rollout
    return last or (interval is not None and (iteration + 1) % interval == 0)


@durable(Step.CHECKPOINT, engines=("training",))
def checkpoint(step: StepCall, trained: Commit, selection: Commit) -> Outcome:
    """Save the training state that `trained` committed. `selection` fixes the cursor and the buffer."""
    run = step.run
    training, began = run.fleet.training, time.perf_counter()
    with run.weights_lock:
        # A step that is tried again finds the copy, although the engine may have trained on since.
        if not training.holds_copy(trained.weight_version_out, trained.state_digest):
            prepare_trainer(run, trained)
            training.copy_state()
    copied = time.perf_counter() - began
    copies_of(run).made(Step.CHECKPOINT, step.iteration)
    files = training.write_copy(step.attempt.store.url, step.attempt.folder)
    training.drop_copy()
    return Outcome(
        files=[step.attempt.adopt(file) for file in files],
        values={"cursor": selection.values["cursor"]},
        timings={"copy": copied},
        weight_version_in=trained.weight_version_out,
        weight_version_out=trained.weight_version_out,
        state_digest=trained.state_digest,
        environment=training.environment,
    )
