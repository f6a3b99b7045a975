"""Weight versions and the age of tokens.

Every iteration publishes one weight version. The first iteration samples from version 0. The version that an iteration
publishes is the one that the next iteration samples from or, with a lag of k, the one k iterations later. The age of a
token counts publications: the iterations between the weights that sampled it and the weights that are trained on it. In
the iteration that samples it, the age is the lag, or less while fewer iterations have passed.
"""

from functools import lru_cache

import numpy as np

from cairn.configs.loader import from_manifest
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger


def version_of(weights: Commit | None) -> int:
    """Return the weight version that a train step left; 0 for the initial weights."""
    if weights is None:
        return 0
    assert weights.weight_version_out is not None
    return weights.weight_version_out


def weight_version_after(ledger: Ledger, iteration: int) -> int:
    """Return the weight version that an iteration leaves, whether it is done or not; 0 for iteration -1."""
    owner = ledger.owner(iteration)
    before = weight_version_after(owner.parent, owner.first_iteration - 1) if owner.parent else 0
    return before + (iteration + 1 - owner.first_iteration) * _steps_of(owner)


def sampled_from(ledger: Ledger, version: int) -> int:
    """Return the iteration that sampled from a weight version as the newest: the inverse of `weight_version_after`,
    plus 1. Raises ValueError for a version that was never published."""
    before = weight_version_after(ledger, ledger.first_iteration - 1)
    if ledger.parent is not None and version < before:
        return sampled_from(ledger.parent, version)
    iterations, rest = divmod(version - before, _steps_of(ledger))
    if rest:
        raise ValueError(f"weight version {version} of run {ledger.run} is inside an iteration: no engine received it")
    return ledger.first_iteration + iterations


def sampled_as_newest(ledger: Ledger, iteration: int) -> int:
    """Return the value of `sampled_from` for tokens that an iteration samples with its newest weights."""
    return max(0, iteration - ledger.owner(iteration).lag)


def token_ages(ledger: Ledger, iteration: int, weight_versions: np.ndarray) -> np.ndarray:
    """Return the age, in iteration `iteration`, of tokens that were sampled from the weight versions [T]: [T] int32."""
    if not len(weight_versions):
        return np.zeros(0, np.int32)
    first, last = int(weight_versions.min()), int(weight_versions.max())
    if first == last:  # as in most batches
        return np.full(len(weight_versions), iteration - sampled_from(ledger, first), np.int32)
    places = weight_versions - first
    versions = np.flatnonzero(np.bincount(places))  # without sorting all tokens
    ages = np.zeros(last - first + 1, np.int32)
    ages[versions] = [iteration - sampled_from(ledger, first + version) for version in versions.tolist()]
    return ages[places]


@lru_cache(maxsize=16)  # to read a whole configuration takes milliseconds, and a manifest never changes
def _steps_of(ledger: Ledger) -> int:
    return from_manifest(ledger.manifest.config).training.num_steps_per_rollout
