"""`diff`: the first step at which two runs part."""

from typing import Any

from cairn.configs.loader import from_manifest
from cairn.storage.ledger.commits import Commit, Step, causal_order
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import differences as differing_fields
from cairn.storage.records import Record
from cairn.storage.upkeep.comparison import Comparison, compare

_BESIDE = (Step.CHECKPOINT, Step.SYNC, Step.EVAL)
"""Steps that nothing else is made from: whether a run has them is a matter of its options."""


class Parting(Record):
    """Where two runs part, if they do."""

    options: tuple[tuple[str, Any, Any], ...]
    """(dotted option, its value in the one, in the other) of their configurations."""
    compared: int
    """Commits that both have and that made the same."""
    shared: int
    """Of them, those that are one and the same commit, since one run is a fork of the other or both of a third."""
    iteration: int | None = None
    """The last that was compared; None where there is nothing to compare."""
    parts_at: str | None = None
    """The first commit that differs, such as `000042/rollout.00-000`; None where the runs are equal as far as both go.
    """
    how: tuple[str, ...] = ()
    """Sentences: what differs there."""
    ended: str | None = None
    """The run that has no more commits, where they are equal as far as it goes."""
    retired: tuple[str, ...] = ()
    """Sentences on the commits up to there whose tables differ in their digests and are not kept by both runs any more:
    their rows could not be compared."""


def diff(ours: Ledger, theirs: Ledger) -> Parting:
    """Compare two runs step by step, in the order in which steps were made from each other. Reads markers, and tables
    only at the step where they part. Raises Damaged."""
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
                return parting(parts_at=commit.name, how=(f"{lacking.run} has none",))
    return parting()


def differing_options(ours: Ledger, theirs: Ledger) -> list[tuple[str, Any, Any]]:
    """(option, its value in the one, in the other), as this version of the code reads both."""
    one, other = (from_manifest(ledger.manifest.config).model_dump(mode="json") for ledger in (ours, theirs))
    return differing_fields(one, other)


def _has_ended_before(commit: Commit, ledger: Ledger, commits: dict[str, Commit]) -> bool:
    """Whether a run, with these commits in the iteration, has not come to the step of a commit that it lacks."""
    order = list(Step)
    last = ledger.last_iteration()
    later = [c for c in commits.values() if c.step not in _BESIDE and order.index(c.step) > order.index(commit.step)]
    return (last is None or last - ledger.lag <= commit.iteration) and not later
