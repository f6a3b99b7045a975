"""`diff`: find the first step at which two runs differ."""

from typing import Any

from cairn.configs.loader import from_manifest
from cairn.storage.ledger.commits import Commit, Step, causal_order
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import differences as differing_fields
from cairn.storage.records import Record
from cairn.storage.upkeep.comparison import Comparison, compare

_LEAVES = (Step.CHECKPOINT, Step.SYNC, Step.EVAL)
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


def diff(first: Ledger, second: Ledger) -> Parting:
    """Compare two runs step by step, in causal order. Reads commits, and tables only where digests differ. Raises
    Damaged."""
    options = tuple(differing_options(first, second))
    compared = shared = 0
    retired: list[str] = []
    iteration = None

    def parting(**where: Any) -> Parting:
        return Parting(
            options=options, compared=compared, shared=shared, iteration=iteration, retired=tuple(retired), **where
        )

    for iteration in sorted({*first.iterations(), *second.iterations()}):
        of_first = {commit.name: commit for commit in first.commits(iteration)}
        of_second = {commit.name: commit for commit in second.commits(iteration)}
        for commit in causal_order({**of_second, **of_first}.values()):
            one, other = of_first.get(commit.name), of_second.get(commit.name)
            if one is not None and other is not None:
                same = one.digest == other.digest
                comparison = Comparison([], []) if same else compare(one, first.store, other, second.store)
                retired += [f"{commit.name}: {sentence}" for sentence in comparison.retired]
                if comparison.differences:
                    return parting(parts_at=commit.name, how=tuple(comparison.differences))
                compared += not comparison.retired
                shared += same
            elif commit.step not in _LEAVES:
                lacking, commits = (first, of_first) if one is None else (second, of_second)
                if _has_ended_before(commit, lacking, commits):
                    return parting(ended=lacking.run)
                return parting(parts_at=commit.name, how=(f"{lacking.run} does not have this commit",))
    return parting()


def differing_options(first: Ledger, second: Ledger) -> list[tuple[str, Any, Any]]:
    """Return (option, value in the first, value in the second run), as this version of the code reads both."""
    one, other = (from_manifest(ledger.manifest.config).model_dump(mode="json") for ledger in (first, second))
    return differing_fields(one, other)


def _has_ended_before(commit: Commit, ledger: Ledger, commits: dict[str, Commit]) -> bool:
    """Whether a run, with these commits in the iteration, has not reached the step of a commit that it lacks."""
    order = list(Step)
    last = ledger.last_iteration()
    later = [c for c in commits.values() if c.step not in _LEAVES and order.index(c.step) > order.index(commit.step)]
    return (last is None or last - ledger.lag <= commit.iteration) and not later
