"""Group sequence policy optimization: the advantages of `grpo`, with the loss `gspo`
(`cairn.engines.training.losses.gspo`)."""

from cairn.configs.kinds import declared, plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages import grpo
from cairn.tasks.advantages.batch import Advantages, ScoredBatch


@plugin(reads=declared(grpo.estimate).reads, loss="gspo")
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return the advantages and returns of `grpo`."""
    return grpo.estimate(batch, config)
