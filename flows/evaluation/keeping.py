"""Weights that are being copied for an evaluation stay, whatever the run's retention says meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager

from cairn.configs.loader import from_manifest
from cairn.storage.decisions import pinned
from cairn.storage.ledger import Ledger
from cairn.storage.pins import pin, unpin

WHY = "an evaluation copies its weights"
"""Stands in the decisions. Where the evaluation is killed the pin stays, until somebody unpins the iteration."""


@contextmanager
def kept(ledger: Ledger, iteration: int) -> Iterator[None]:
    """Pin an iteration where its run keeps nothing for ever, and a person has not. Raises Retired if it is gone."""
    owner = ledger.owner(iteration)
    retention = from_manifest(owner.manifest.config).checkpoint
    before = pinned(owner.decisions.all()).get(iteration)
    everything_stays = retention.save_retain_interval is None and retention.retain_snapshots is None
    if everything_stays or (before is not None and before.why != WHY):
        yield
        return
    ours = pin(owner, iteration, why=WHY)
    try:
        yield
    finally:
        newest = pinned(owner.decisions.all()).get(iteration)
        if newest is not None and newest.number == ours.number:  # nobody has pinned it since
            unpin(owner, iteration, why=WHY)
