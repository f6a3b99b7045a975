"""`diff`: find the first step at which two runs differ."""

from typing import Any

from cairn.configs.loader import from_manifest
from cairn.storage.ledger.commits import Commit, Step, causal_order
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import differences as differing_fields
from cairn.storage.records import Record
from cairn.storage.upkeep.comparison import Comparison, compare

_BESIDE = (Step.CHECKPOINT, Step.SYNC, Step.EVAL)
"""Steps that are no input of other steps: whether a run has them depends on its options."""


class Parting(Record):
    """First difference between two runs, if there is one."""

    options: tuple[tuple[str, Any, Any], ...]
    """(dotted option, value in the first, value in the second run) for each option whose values differ."""
    compared: int
    """Number of commits that both runs have and whose results are equal."""
    shared: int
    """Number of those that are one and the same commit, because one run is a fork of the other or both of a third."""
    iteration: int | None = None
    """Last compared iteration; None where there is nothing to compare."""
    parts_at: str | None = None
    """First differing commit, such as `000042/rollout.00-000`; None where the runs are equal as far as both go."""
    how: tuple[str, ...] = ()
    """Sentences on the differences there."""
    ended: str | None = None
    """Name of the run that has no more commits, where both are equal up to its end."""
    retired: tuple[str, ...] = ()
    """Sentences on earlier commits whose tables differ in their digests and are no longer retained by both runs: their
    rows could not be compared."""


def diff(ours: Ledger, theirs: Ledger) -> Parting:
    """Compare two runs step by step, in causal order. Reads commits, and tables only where digests differ. Raises
    Damaged."""
    options = tuple(differing_options(ours, theirs))
    compared = shared = 0
    retired: list[str] = []
    iteration = None

    def parting(**found: Any) -> Parting:
        return Parting(
            options=options, compared=compared, shared=shared, iteration=iteration, retired=tuple(retired), **found
        )

    for iteration in sorted({*ours.iterations(), *theirs.iterations()}):
        here = {commit.name: commit for commit in ours.commits(iteration)}
        there = {commit.name: commit for commit in theirs.commits(iteration)}
        for commit in causal_order({**there, **here}.values()):
            first, second = here.get(commit.name), there.get(commit.name)
            if first is not None and second is not None:
                same = first.digest == second.digest
                found = Comparison([], []) if same else compare(first, ours.store, second, theirs.store)
                retired += [f"{commit.name}: {sentence}" for sentence in found.retired]
                if found.differences:
                    return parting(parts_at=commit.name, how=tuple(found.differences))
                compared += not found.retired
                shared += first.digest == second.digest
            elif commit.step not in _BESIDE:
                lacking, commits = (ours, here) if first is None else (theirs, there)
                if _has_ended_before(commit, lacking, commits):
                    return parting(ended=lacking.run)
                return parting(parts_at=commit.name, how=(f"{lacking.run} does not have this commit",))
    return parting()


def differing_options(ours: Ledger, theirs: Ledger) -> list[tuple[str, Any, Any]]:
    """Return (option, value in the first, value in the second run), as this version of the code reads both."""
    one, other = (from_manifest(ledger.manifest.config).model_dump(mode="json") for ledger in (ours, theirs))
    return differing_fields(one, other)


def _has_ended_before(commit: Commit, ledger: Ledger, commits: dict[str, Commit]) -> bool:
    """Whether a run, with these commits in the iteration, has not reached the step of a commit that it lacks."""
    order = list(Step)
    last = ledger.last_iteration()
    later = [c for c in commits.values() if c.step not in _BESIDE and order.index(c.step) > order.index(commit.step)]
    return (last is None or last - ledger.lag <= commit.iteration) and not later
