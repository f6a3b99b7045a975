"""The tokens that a loss treats apart in an optimizer step: what it picks of all of the step's trained tokens.

Every rank has the advantages and the log-probs of the policy before the update of all samples, before anything is cut:
so all pick the same tokens, however the step is then cut into micro-batches and spread over ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cairn.configs.kinds import LOSS, declared
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.types import TrainBatch


def with_picked(batch: TrainBatch, sequences: Sequence[int], algorithm: AlgorithmConfig) -> TrainBatch:
    """The batch with the tokens that the loss picks; itself where the loss picks none. Raises BadPlugin where what it
    picks is no bool for each token.

    Args:
        sequences: those of the optimizer step that have a trained token.
    """
    picks = declared(LOSS.load(algorithm.loss)).picks
    if picks is None:
        return batch
    assert batch.advantages is not None
    assert batch.old_log_probs is not None
    masks = [batch.loss_mask[i].astype(bool) for i in sequences]
    advantages, log_probs = (
        np.concatenate([field[i][mask] for i, mask in zip(sequences, masks, strict=True)])
        for field in (batch.advantages, batch.old_log_probs)
    )
    found = np.asarray(picks(advantages, log_probs, algorithm))
    if found.shape != advantages.shape or found.dtype != bool:
        raise BadPlugin(
            f"the loss {algorithm.loss!r} picks {found.dtype} of shape {found.shape}: let it pick [{len(advantages)}] "
            "bool, one for each trained token of the optimizer step"
        )
    picked = [np.zeros(length, bool) for length in batch.response_lengths]
    for i, mask, part in zip(sequences, masks, np.split(found, np.cumsum([m.sum() for m in masks])[:-1]), strict=True):
        picked[i][mask] = part
    return replace(batch, picked=picked)
