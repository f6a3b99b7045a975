"""In which order training and rollout have the GPUs that they share.

    rollout releases → training onloads → trains → offloads → rollout resumes its weights' memory → they are updated
    → rollout resumes its cache

Each engine knows for itself what it gave away, and a call for what is done already does nothing: whatever a crash left
half done, the next turn completes.
"""

from collections.abc import Callable, Sequence

from engines.calls import at_the_same_time
from engines.rollout.handle import RolloutHandle
from engines.training.handle import TrainingHandle


class Turns:
    """Who has the memory. Without offloading both have theirs at any time, and nothing is done here.

    Every call may raise EngineError.
    """

    def __init__(
        self, rollout: Sequence[RolloutHandle], training: TrainingHandle, *, offload_rollout: bool, offload_train: bool
    ) -> None:
        self._rollout, self._training = rollout, training
        self._offload_rollout, self._offload_train = offload_rollout, offload_train

    def release_rollout(self) -> None:
        """Take the memory of every rollout engine that lives: for training, or before it starts again."""
        if self._offload_rollout:
            self._on_rollout(lambda engine: engine.release_memory())

    def for_training(self) -> None:
        """Training has the memory."""
        self.release_rollout()
        if self._offload_train:
            self._training.onload()

    def for_update(self) -> None:
        """The rollout engines have memory for weights, which are to be sent."""
        self.offload_training()
        if self._offload_rollout:
            self._on_rollout(lambda engine: engine.resume_memory("weights"))

    def for_rollout(self) -> None:
        """The rollout engines have all their memory."""
        self.offload_training()
        if self._offload_rollout:
            self._on_rollout(lambda engine: engine.resume_memory("kv_cache"))

    def offload_training(self) -> None:
        """Training gives its memory away."""
        if self._offload_train:
            self._training.offload()

    def _on_rollout(self, work: Callable[[RolloutHandle], None]) -> None:
        at_the_same_time(self._rollout, work)
