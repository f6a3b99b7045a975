"""Reading of the weights that sync steps stored: no trainer takes part, and nothing is replayed."""

from typing import TYPE_CHECKING

from cairn.engines.weights.layout import StoredVersion
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.publications import Find, chain, stored
from cairn.storage.store.errors import Damaged
from cairn.storage.store.store import StoredFile
from cairn.storage.upkeep.retention import is_retired

if TYPE_CHECKING:  # the driver names these files, and loads no PyTorch
    import torch


def has_weights(ledger: Ledger, synced: Commit) -> bool:
    """Return whether the weights of a sync step are stored, and not removed by the run's retention. Raises Damaged for
    an unknown format."""
    return stored(synced) is not None and not is_retired(ledger, synced)


def stored_versions(find: Find, synced: Commit) -> list[StoredVersion]:
    """Return the files from which the weights of a sync step are read: whole weights, and the differences after them.
    Raises Damaged."""
    return [_files_of(commit) for commit in chain(find, synced)]


def read_weights(ledger: Ledger, synced: Commit) -> "dict[str, torch.Tensor]":
    """Return the weights that a sync step stored, in the run's `rollout.dtype`, by the names of weight files.

    Raises:
        Damaged: a file, or a commit between them and the last whole weights, is missing or altered; or the weights do
            not have the digest that was committed.
    """
    from cairn.engines.weights.fingerprint import weights_checksum
    from cairn.engines.weights.versions import read_version

    versions = stored_versions(ledger.find, synced)
    weights = read_version(ledger.store, versions)
    found = weights_checksum(weights.items())
    if found != versions[-1].digest:
        raise Damaged(
            f"{versions[-1].name} has digest {found} as it is stored, and {versions[-1].digest} was committed"
        )
    return weights


def _files_of(commit: Commit) -> StoredVersion:
    files = (StoredFile(layout.in_run(commit.run, file.path), file.bytes, file.sha256) for file in commit.outputs)
    name = f"weight version {commit.weight_version_out} of {commit.run} ({commit.name})"
    return StoredVersion(name, str(commit.values["digest"]), tuple(files))
