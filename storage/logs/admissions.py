"""Claims of admissions: a claim fixes which prompts a stream admits next before any driver draws them.

Admissions are numbered in order. Before a driver makes an admission, it claims the number exclusively:
```
runs/<run>/stream/admissions/<number>.json
```

| a driver that admits the next prompts finds | action |
|---|---|
| no claim of that number | claims it and makes its admission |
| a claim of its own admission | makes it |
| a claim of another admission, which an earlier driver was about to make | first makes that one, as claimed |

So if an earlier driver commits late, it makes the same admission and never takes the number of another one. Claims
stay, as commits do. Ledgers of earlier versions have no claims for their admissions.
"""

import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step, parse_commit_name
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.redacted import Fault, Finding, commit_finding
from cairn.storage.records import Record
from cairn.storage.store import canonical
from cairn.storage.store.errors import Damaged, StoreError, naming_damaged
from cairn.storage.store.store import Store


class Claim(Record):
    """Plan of one admission."""

    schema_version: int = 1
    run: str
    number: int
    """Number among all admissions of the run, from 0."""
    iteration: int
    """Iteration in which the admission is committed."""
    shard: str
    count: int
    """Number of prompts to draw."""
    without: tuple[int, ...]
    """Prompts excluded from the draw, as rows of the data set."""
    epoch: int
    """Epoch of the driver that made the claim."""
    id: str
    """Random id; no two claims are equal."""
    claimed_at: float
    """Unix seconds."""

    @property
    def admission(self) -> str:
        """Name of the admission's commit."""
        return layout.commit_name(self.iteration, Step.ADMIT, self.shard)


def claim_admission(
    ledger: Ledger, number: int, *, iteration: int, shard: str, count: int, without: Sequence[int]
) -> Claim:
    """Claim a number for an admission and return the claim that the ledger now has.

    If another admission was first, that is its claim. Raises LeaseLost if this driver no longer owns the run, and
    Damaged.
    """
    assert ledger.lease is not None
    claim = Claim(
        run=ledger.run,
        number=number,
        iteration=iteration,
        shard=shard,
        count=count,
        without=tuple(without),
        epoch=ledger.lease.epoch,
        id=uuid.uuid4().hex,
        claimed_at=time.time(),
    )
    path = layout.admission(ledger.run, number)
    if ledger.store.create(path, canonical.seal(claim.model_dump(mode="json")), ledger.require_lease):
        return claim
    first = find_claim(ledger.store, ledger.run, number)
    if first is None:
        raise StoreError(f"{path} could not be created, but it does not exist either")
    return first


def find_claim(store: Store, run: str, number: int) -> Claim | None:
    """Return the claim of an admission, or None. Raises Damaged."""
    path = layout.admission(run, number)
    try:
        return read_claim(store.read(path), path)
    except FileNotFoundError:
        return None


def read_claim(data: bytes, path: str) -> Claim:
    """Parse the claim stored at a path. Raises Damaged."""
    with naming_damaged(path):
        claim = Claim.model_validate(canonical.unseal(data))
    if path != layout.admission(claim.run, claim.number):
        raise Damaged(f"{path} is in the wrong place: it names admission {claim.number} of run {claim.run!r}")
    return claim


def claimed_numbers(store: Store, run: str) -> list[int]:
    """Return the numbers of all claimed admissions of a run, in order. Makes one listing."""
    return layout.numbers(store.list(layout.admissions(run)))


def newest_claim(store: Store, run: str) -> Claim | None:
    """Return the newest claim of a run, whose admission may not be committed yet, or None. Raises Damaged."""
    numbers = claimed_numbers(store, run)
    return find_claim(store, run, numbers[-1]) if numbers else None


# Accounting of admitted prompts: a rollout step has taken the group of each, once, or the group is open.
#
# a group that is admitted                          by exactly one admission
# a group that a rollout step takes                 is admitted, and no other step takes it
# a group that no step takes                        is left open by the newest step, or was admitted after it
# an admission whose number is claimed              matches its claim
# a claim                                           has its admission, or is the newest claim


class Admitted:
    """Follows groups from their admission. Stores a few bytes for each."""

    def __init__(self, claims: Sequence[Claim] = ()) -> None:
        """`claims` are those of the run, read before its commits."""
        self._claims = claims
        self._numbered: dict[int, Commit] = {}
        self._admitted: dict[int, Commit] = {}
        self._taken: dict[int, str] = {}
        self._newest: Commit | None = None
        """Newest step that took groups."""
        self._findings: list[Finding] = []

    def take(self, commit: Commit) -> None:
        """Account for a commit. Call it for all commits in the order of iterations, steps and shards."""
        if commit.step is Step.ADMIT:
            self._numbered[_number(commit)] = commit
            for id in _ids(commit):
                earlier = self._admitted.setdefault(id, commit)
                if earlier.name != commit.name:
                    self._differs(commit, f"group {id} is admitted by {commit.name} and {earlier.name}")
        elif commit.step is Step.ROLLOUT and "admitted" in commit.values:
            self._newest = commit
            for id in _ids(commit):
                earlier_take = self._taken.setdefault(id, commit.name)
                if earlier_take != commit.name:
                    self._differs(commit, f"group {id} is taken by {commit.name} and {earlier_take}")

    def open(self) -> int:
        """Return the number of groups that no step has taken."""
        return len(self._admitted.keys() - self._taken.keys())

    def findings(self) -> Iterator[Finding]:
        """Yield all contradictions, after the last commit."""
        yield from self._findings
        yield from self._not_as_claimed()
        newest = self._newest
        if newest is None:
            return
        for id in sorted(self._taken.keys() - self._admitted.keys()):
            message = f"group {id} is taken by {self._taken[id]}, but was never admitted"
            yield commit_finding(newest, Fault.GROUP_DIFFERS, message)
        still, last = _left_open(newest), str(newest.values["admitted"])
        number = next((_number(one) for one in self._admitted.values() if one.name == last), -1)
        for id, admission in self._admitted.items():
            if id not in self._taken and id not in still and _number(admission) <= number:
                message = (
                    f"group {id} is admitted by {admission.name}, but {newest.name} neither took it nor left it open"
                )
                yield commit_finding(newest, Fault.GROUP_LOST, message)

    def _not_as_claimed(self) -> Iterator[Finding]:
        last = max(self._numbered, default=-1)
        for claim in self._claims:
            admission, name = self._numbered.get(claim.number), claim.admission
            if admission is None and claim.number < last:
                message = f"admission {claim.number} is claimed for {name}, but is missing, although later ones exist"
            elif admission is not None and (admission.name, len(_ids(admission))) != (name, claim.count):
                message = (
                    f"admission {claim.number} is claimed for {name} with {claim.count} groups, but is "
                    f"{admission.name} with {len(_ids(admission))}"
                )
            else:
                continue
            path = layout.admission(claim.run, claim.number)
            yield Finding(fault=Fault.ADMISSION_DIFFERS, path=path, message=message)

    def _differs(self, commit: Commit, message: str) -> None:
        self._findings.append(commit_finding(commit, Fault.GROUP_DIFFERS, message))


def open_groups(ledger: Ledger) -> set[int]:
    """Return the groups of a run that no rollout step has taken: left open by the newest step, or admitted after it.

    While a driver is running, the result is a recent snapshot. Reads the commits of the newest iterations.
    """
    admissions: list[Commit] = []
    for iteration in reversed(ledger.iterations()):
        commits = ledger.commits(iteration)
        admissions += [commit for commit in commits if commit.step is Step.ADMIT]
        takes = [commit for commit in commits if commit.step is Step.ROLLOUT and "admitted" in commit.values]
        if takes:
            newest = takes[-1]
            last = ledger.find(*parse_commit_name(str(newest.values["admitted"])))
            number = -1 if last is None else _number(last)
            return _left_open(newest) | {id for one in admissions if _number(one) > number for id in _ids(one)}
    return {id for one in admissions for id in _ids(one)}


def _ids(commit: Commit) -> list[int]:
    groups = commit.values["groups"]
    assert isinstance(groups, list)
    return groups  # type: ignore[return-value]


def _left_open(rollout: Commit) -> set[int]:
    """Return the groups that a rollout step left open."""
    left: Any = rollout.values["open"]
    return {id for ids in left.values() for id in ids}


def _number(admission: Commit) -> int:
    number = admission.values["number"]
    assert isinstance(number, int)
    return number
