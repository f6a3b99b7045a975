"""Clipped importance sampling policy optimization: the advantages of `grpo`, with the loss `cispo`
(`cairn.engines.training.losses.cispo`)."""

from cairn.configs.kinds import declared, plugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages import grpo
from cairn.tasks.advantages.batch import Advantages, ScoredBatch


@plugin(reads=declared(grpo.estimate).reads, loss="cispo")
def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> Advantages:
    """Return the advantages and returns of `grpo`."""
    return grpo.estimate(batch, config)
