"""Reading of the weights that sync steps stored: no trainer takes part, and nothing is replayed."""

import torch

from cairn.engines.weights.fingerprint import weights_checksum
from cairn.engines.weights.versions import StoredVersion, read_version
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.publications import chain, stored
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import StoredFile
from cairn.storage.upkeep.retention import is_retired


def has_weights(ledger: Ledger, synced: Commit) -> bool:
    """Return whether the weights of a sync step are stored, and not removed by the run's retention. Raises Damaged for
    an unknown format."""
    return stored(synced) is not None and not is_retired(ledger, synced)


def stored_version(commit: Commit) -> StoredVersion:
    """Return the files of one sync step."""
    files = (StoredFile(layout.in_run(commit.run, file.path), file.bytes, file.sha256) for file in commit.outputs)
    return StoredVersion(f"weight version {commit.weight_version_out} of {commit.run} ({commit.name})", tuple(files))


def read_weights(ledger: Ledger, synced: Commit) -> dict[str, torch.Tensor]:
    """Return the weights that a sync step stored, in the run's `rollout.dtype`, by the names of weight files.

    Raises:
        Damaged: a file, or a commit between them and the last whole weights, is missing or altered; or the weights do
            not have the digest that was committed.
    """
    weights = read_version(ledger.store, [stored_version(commit) for commit in chain(ledger, synced)])
    found = weights_checksum(weights.items())
    if found != synced.values["digest"]:
        raise Damaged(
            f"{stored_version(synced).name} has digest {found} as it is stored, and {synced.values['digest']} was "
            "committed"
        )
    return weights
