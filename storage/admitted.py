"""What became of every prompt that a stream admitted: a rollout step has taken its group, once, or it is open.

a group that is admitted                          by one admission
a group that a rollout step takes                 is admitted, and no other step takes it
a group that no step takes                        is left open by the newest one, or was admitted after it
an admission whose number is claimed              is what was claimed (`cairn.storage.admissions`)
a claim                                           has its admission, or is the newest
"""

from collections.abc import Iterator, Sequence

from cairn.storage import layout
from cairn.storage.admissions import Claim
from cairn.storage.commits import Commit, Step
from cairn.storage.findings import Fault, Finding
from cairn.storage.ledger import Ledger


class Admitted:
    """Follows groups from their admission. Remembers a few bytes of each."""

    def __init__(self, claims: Sequence[Claim] = ()) -> None:
        """`claims`: those of the run, read before its commits."""
        self._claims = claims
        self._numbered: dict[int, Commit] = {}
        self._admitted: dict[int, Commit] = {}
        self._taken: dict[int, str] = {}
        self._newest: Commit | None = None
        """The newest step that took groups."""
        self._found: list[Finding] = []

    def take(self, commit: Commit) -> None:
        """Account for a commit; of all in the order of iterations, steps and shards."""
        if commit.step is Step.ADMIT:
            self._numbered[_number(commit)] = commit
            for id in _ids(commit):
                earlier = self._admitted.setdefault(id, commit)
                if earlier.name != commit.name:
                    self._tell(
                        commit, Fault.GROUP_DIFFERS, f"group {id} is admitted by {commit.name} and {earlier.name}"
                    )
        elif commit.step is Step.ROLLOUT and "admitted" in commit.values:
            self._newest = commit
            for id in _ids(commit):
                earlier_take = self._taken.setdefault(id, commit.name)
                if earlier_take != commit.name:
                    self._tell(commit, Fault.GROUP_DIFFERS, f"group {id} is taken by {commit.name} and {earlier_take}")

    def open(self) -> int:
        """Groups that no step has taken."""
        return len(self._admitted.keys() - self._taken.keys())

    def findings(self) -> Iterator[Finding]:
        """After the last commit, all that is not as it must be."""
        yield from self._found
        yield from self._not_as_claimed()
        newest = self._newest
        if newest is None:
            return
        for id in sorted(self._taken.keys() - self._admitted.keys()):
            yield _finding(newest, Fault.GROUP_DIFFERS, f"group {id} is taken by {self._taken[id]}, and never admitted")
        left, last = newest.values["open"], str(newest.values["admitted"])
        assert isinstance(left, dict)
        still = {id for ids in left.values() for id in ids}  # type: ignore[union-attr]
        number = next((_number(one) for one in self._admitted.values() if one.name == last), -1)
        for id, admission in self._admitted.items():
            if id not in self._taken and id not in still and _number(admission) <= number:
                told = f"group {id} is admitted by {admission.name}, and {newest.name} neither took it nor left it open"
                yield _finding(newest, Fault.GROUP_LOST, told)

    def _not_as_claimed(self) -> Iterator[Finding]:
        last = max(self._numbered, default=-1)
        for claim in self._claims:
            found, name = self._numbered.get(claim.number), claim.admission
            if found is None and claim.number < last:
                message = f"admission {claim.number} is claimed for {name}, and is missing, though later ones are there"
            elif found is not None and (found.name, len(_ids(found))) != (name, claim.count):
                message = (
                    f"admission {claim.number} is claimed for {name} with {claim.count} groups, and is {found.name} "
                    f"with {len(_ids(found))}"
                )
            else:
                continue
            path = layout.admission(claim.run, claim.number)
            yield Finding(fault=Fault.ADMISSION_DIFFERS, path=path, message=message)

    def _tell(self, commit: Commit, fault: Fault, message: str) -> None:
        self._found.append(_finding(commit, fault, message))


def open_groups(ledger: Ledger) -> set[int]:
    """The groups of a run that no rollout step has taken: those that the newest one left, and what was admitted after.
    While a driver is at work, those of a moment ago. Reads the commits of the newest iterations."""
    admissions: list[Commit] = []
    for iteration in reversed(ledger.iterations()):
        commits = ledger.commits(iteration)
        admissions += [commit for commit in commits if commit.step is Step.ADMIT]
        takes = [commit for commit in commits if commit.step is Step.ROLLOUT and "admitted" in commit.values]
        if takes:
            newest = takes[-1]
            place, _, shard = str(newest.values["admitted"]).partition(f"/{Step.ADMIT}.")
            last = ledger.find(int(place), Step.ADMIT, shard)
            number = -1 if last is None else _number(last)
            left = newest.values["open"]
            assert isinstance(left, dict)
            still: set[int] = {id for ids in left.values() for id in ids}  # type: ignore[union-attr, misc]
            return still | {id for one in admissions if _number(one) > number for id in _ids(one)}
    return {id for one in admissions for id in _ids(one)}


def _ids(commit: Commit) -> list[int]:
    groups = commit.values["groups"]
    assert isinstance(groups, list)
    return groups  # type: ignore[return-value]


def _number(admission: Commit) -> int:
    number = admission.values["number"]
    assert isinstance(number, int)
    return number


def _finding(commit: Commit, fault: Fault, message: str) -> Finding:
    path = layout.commit(commit.run, commit.iteration, commit.step, commit.shard)
    return Finding(fault=fault, path=path, message=message)
