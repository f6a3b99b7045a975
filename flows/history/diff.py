"""What differs between two runs: options, code and other inputs, and the first step with another result."""

from typing import Any

from cairn.configs.kinds import user_code
from cairn.storage.ledger.commits import Commit, Step, causal_order
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.terms import differences as differing_fields
from cairn.storage.records import Record
from cairn.storage.upkeep.comparison import Comparison, compare

_LEAVES = (Step.CHECKPOINT, Step.SYNC, Step.EVAL)
"""Steps that are no input of other steps: whether a run has them depends on its options."""


class OtherInput(Record):
    """An input from outside the ledger whose bytes differ between two runs."""

    name: str
    """File or module of user code, or what the input is, such as `data`."""
    option: str | None = None
    """Option that names the code; None for another input."""
    first: str | None
    """Digest in the first run; None where it has no such input."""
    second: str | None

    def __str__(self) -> str:
        first, second = (f"{digest[:4]}…" if digest else "none" for digest in (self.first, self.second))
        return f"{self.name}: {first} → {second}"


class Parting(Record):
    """First difference between two runs, if there is one."""

    options: tuple[tuple[str, Any, Any], ...]
    """(dotted option, value in the first, value in the second run) for each option whose values differ."""
    inputs: tuple[OtherInput, ...] = ()
    """User code, data and models that differ."""
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


def diff(first: Ledger, second: Ledger, until: int | None = None) -> Parting:
    """Compare two runs step by step, in causal order. Reads commits, and tables only where digests differ. Raises
    Damaged.

    `until`: last iteration to compare; None for all.
    """
    options, inputs = tuple(differing_options(first, second)), tuple(differing_inputs(first, second))
    compared = shared = 0
    retired: list[str] = []
    iteration = None

    def parting(**where: Any) -> Parting:
        return Parting(
            options=options,
            inputs=inputs,
            compared=compared,
            shared=shared,
            iteration=iteration,
            retired=tuple(retired),
            **where,
        )

    numbers = sorted({*first.iterations(), *second.iterations()})
    for iteration in (number for number in numbers if until is None or number <= until):
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
    one, other = (ledger.config.model_dump(mode="json") for ledger in (first, second))
    return differing_fields(one, other)


def differing_inputs(first: Ledger, second: Ledger) -> list[OtherInput]:
    """Return user code, data and models whose digests differ. An input that only one run has counts where it is user
    code."""
    one, other = first.terms, second.terms
    options = [user_code(terms.read_config) for terms in (one, other)]
    found = []
    for name in sorted({*one.inputs, *other.inputs}):
        code = options[0].get(name) or options[1].get(name)
        before, after = (terms.plugin_digest(name) if code else terms.inputs.get(name, "") for terms in (one, other))
        if name.endswith(":modules") or before == after or not (code or (before and after)):
            continue
        label = name if code is None else ", ".join(dict.fromkeys(path.rpartition(":")[0] or path for path in code))
        option = None if code is None else name
        found.append(OtherInput(name=label, option=option, first=before or None, second=after or None))
    return found


def _has_ended_before(commit: Commit, ledger: Ledger, commits: dict[str, Commit]) -> bool:
    """Whether a run, with these commits in the iteration, has not reached the step of a commit that it lacks."""
    order = list(Step)
    last = ledger.last_iteration()
    later = [c for c in commits.values() if c.step not in _LEAVES and order.index(c.step) > order.index(commit.step)]
    return (last is None or last - ledger.lag <= commit.iteration) and not later
