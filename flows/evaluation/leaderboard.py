"""All results of a store, those that can be compared beside each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from cairn.flows.evaluation.comparing import Comparison, best_first, compare, find_baseline, name_of
from cairn.storage.evals import Evaluation, results
from cairn.storage.store import Store


@dataclass(frozen=True)
class Standing:
    """One result's place."""

    rank: int
    """Among results of equal questions, from 1."""
    model: str
    result: Evaluation
    newest: bool
    """Whether it is the last of its group that was computed, the baseline's own aside."""
    baseline: Evaluation | None = None
    comparison: Comparison | None = None
    """Against the baseline; None for the baseline itself, and where there is none in its group."""


def leaderboard(
    store: Store, benchmark: str | None = None, baseline: str | None = None, margin: float = 0.0
) -> list[Standing]:
    """Every result, by benchmark and questions, the best first; held against the baseline where one is named. Raises
    Damaged."""
    found: list[Standing] = []
    for group in best_first(results(store)):
        if benchmark in (None, group[0].key.benchmark):
            found += _ranked(store, group, baseline, margin)
    return found


def _ranked(store: Store, group: Sequence[Evaluation], baseline: str | None, margin: float) -> list[Standing]:
    against = None if baseline is None else find_baseline(group, baseline)
    others = [one for one in group if one is not against]
    newest = max(others, key=lambda one: one.committed_at, default=None)
    return [
        Standing(
            rank,
            name_of(one),
            one,
            one is newest,
            against,
            None if against is None or one is against else compare(store, one, against, margin),
        )
        for rank, one in enumerate(group, 1)
    ]
