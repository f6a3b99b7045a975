"""The driver's handle on the reward model."""

import threading
from collections.abc import Mapping, Sequence

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.actors import EngineActor
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.handles import Actor, ModelHandle
from cairn.engines.scoring.reward_model import PromptAndResponse, RewardModel, Score

REWARD_MODEL = "cairn.engines.scoring.reward_model:RewardModel"


class RewardModelHandle(ModelHandle):
    """The reward model as the driver sees it. `cairn.engines.scoring.reward_model` describes its calls; all may raise
    EngineDied and EngineTimeout."""

    def __init__(self, name: str, actor: Actor, config: RunConfig, digests: Mapping[str, str]) -> None:
        assert config.reward.reward_model is not None
        self._options = config.reward.reward_model
        super().__init__(name, [actor], config.fleet, {"reward_model": self._options.path}, digests)
        self._each = config.reward.rm_timeout
        self._turn = threading.Lock()

    def score(self, answered: Sequence[PromptAndResponse]) -> list[Score]:
        """Return scores, in order. A dead engine is replaced first. The deadline is `fleet.call_timeout` seconds, or
        `reward.rm_timeout` for each if that is more. Threads take turns, and waiting for a turn does not count towards
        the deadline."""
        with self._turn:
            self.ensure_alive()
            deadline = Deadline(max(self._fleet.call_timeout, self._each * len(answered)))
            return self.call(None, RewardModel.score, answered).result(deadline)

    def _make_engine(self, deadline: Deadline) -> None:
        self.call(None, EngineActor.make, REWARD_MODEL, self._options).result(deadline)
