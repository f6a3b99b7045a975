"""Weights that are being copied for an evaluation stay, whatever the run's retention says meanwhile."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from cairn.configs.loader import from_manifest
from cairn.storage.decision_kinds import Pin
from cairn.storage.decisions import Decision
from cairn.storage.ledger import Ledger
from cairn.storage.pins import pin

WHY = "an evaluation copies its weights"
"""Stands in the decisions. Where the evaluation is killed the pin stays, until somebody unpins the iteration."""
_ENDED = re.compile(r"the evaluation of decision (\d+) has copied its weights")


class _Settled(Exception):
    """Somebody has decided about the iteration meanwhile, so there is nothing more to say."""


@contextmanager
def kept(ledger: Ledger, iteration: int) -> Iterator[None]:
    """Pin an iteration where its run keeps nothing for ever, and a person has not. Of several evaluations that copy it
    at once the one that ends last unpins it. Raises Retired if it is gone."""
    owner = ledger.owner(iteration)
    retention = from_manifest(owner.manifest.config).checkpoint
    everything_stays = retention.save_retain_interval is None and retention.retain_snapshots is None
    if everything_stays or _standing(owner.decisions.all(), iteration)[0]:
        yield
        return
    ours = pin(owner, iteration, why=WHY)
    try:
        yield
    finally:
        with suppress(_Settled):
            _end(owner, iteration, ours.number)


def _end(ledger: Ledger, iteration: int, ours: int) -> None:
    def release(so_far: tuple[Decision, ...]) -> Pin:
        by_a_person, copying = _standing(so_far, iteration)
        if by_a_person or ours not in copying:
            raise _Settled
        return Pin(iteration=iteration, kept=copying != {ours})

    ledger.decisions.record(release, why=f"the evaluation of decision {ours} has copied its weights")


def _standing(decisions: Iterable[Decision], iteration: int) -> tuple[bool, set[int]]:
    """Whether a person has pinned an iteration, and the numbers of the pins of evaluations that copy it."""
    by_a_person, copying = False, set[int]()
    for decision in decisions:
        if not isinstance(decision.what, Pin) or decision.what.iteration != iteration:
            continue
        if decision.why == WHY and decision.what.kept:
            copying.add(decision.number)
        elif ended := _ENDED.fullmatch(decision.why or ""):
            copying.discard(int(ended[1]))
        else:
            by_a_person, copying = decision.what.kept, set()
    return by_a_person, copying
