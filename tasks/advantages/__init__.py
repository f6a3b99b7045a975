"""From rewards to advantages. One estimator a file, `estimate(batch, config) -> (advantages, returns)`: see
`cairn.tasks.advantages.batch`. What one needs of the scores it declares, with `cairn.plugin`."""

import numpy as np

from cairn.configs.kinds import ESTIMATOR
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.tasks.advantages.batch import Estimator, ScoredBatch

__all__ = ["Estimator", "ScoredBatch", "estimate"]


def estimate(batch: ScoredBatch, config: AlgorithmConfig) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Advantages and returns of a batch, [T_i] float32 of each sample, by `algorithm.advantage_estimator`.

    Raises BadPlugin where the estimator returns anything else.
    """
    name = config.advantage_estimator
    function: Estimator = ESTIMATOR.load(name)
    found = function(batch, config)
    lengths = [len(mask) for mask in batch.loss_masks]
    try:
        advantages, returns = ([np.asarray(field, np.float32) for field in fields] for fields in found)
        fits = all([field.shape for field in fields] == [(n,) for n in lengths] for fields in (advantages, returns))
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise BadPlugin(
            f"the advantage estimator {name!r} returned something else than (advantages, returns), each with an array "
            f"for each of the {len(lengths)} samples, of as many numbers as it has response tokens: correct it"
        )
    return advantages, returns
