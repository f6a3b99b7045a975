"""Pins: an iteration whose weights and samples are kept, whatever the run's retention says.

A pin is a decision (`cairn.storage.decisions`); `cairn.storage.retention` keeps what it needs. Somebody may retire that
very iteration meanwhile: the pin is recorded first and then looks for the markers of retirement, and retirement, which
marks first, looks for pins. Where both see each other the files stay, and so does the pin that is set again.
"""

from cairn.storage import layout
from cairn.storage.commits import Step
from cairn.storage.decision_kinds import Pin
from cairn.storage.decisions import Decision, pinned
from cairn.storage.errors import Retired
from cairn.storage.ledger import Ledger
from cairn.storage.retention import brought_back_from


def pin(ledger: Ledger, iteration: int, *, by: str | None = None, why: str | None = None) -> Decision:
    """Keep what brings an iteration back. Raises ValueError if the run has not made it or shares it with its parent,
    Retired if something of it is gone."""
    if iteration < ledger.first_iteration:
        assert ledger.parent is not None
        raise ValueError(
            f"iteration {iteration} of run {ledger.run!r} is one of {ledger.owner(iteration).run!r}: pin it there"
        )
    if ledger.find(iteration, Step.TRAIN) is None:
        raise ValueError(f"run {ledger.run!r} has not trained iteration {iteration} yet")
    _require_there(ledger, iteration)
    decision = ledger.decisions.record(lambda so_far: Pin(iteration=iteration, kept=True), by=by, why=why)
    try:
        _require_there(ledger, iteration)
    except Retired:
        ledger.decisions.record(lambda so_far: Pin(iteration=iteration, kept=False), by=by, why="it was being retired")
        raise
    return decision


def unpin(ledger: Ledger, iteration: int, *, by: str | None = None, why: str | None = None) -> Decision:
    """Leave an iteration to the run's retention again. Raises ValueError if it is not pinned."""

    def release(so_far: tuple[Decision, ...]) -> Pin:
        if iteration not in pinned(so_far):
            raise ValueError(f"iteration {iteration} of run {ledger.run!r} is not pinned")
        return Pin(iteration=iteration, kept=False)

    return ledger.decisions.record(release, by=by, why=why)


def _require_there(ledger: Ledger, iteration: int) -> None:
    for i, kind in sorted(brought_back_from(ledger, iteration)):
        if i >= ledger.first_iteration and ledger.store.exists(layout.retired(ledger.run, i, kind)):
            raise Retired(
                f"iteration {iteration} of run {ledger.run!r} cannot be pinned: that needs the {kind} of iteration "
                f"{i}, retired already"
            )
