"""Claims of admissions: which prompts a stream admits next is decided before anybody draws them.

Admissions follow each other, and each has its number. Before one is made it claims that number exclusively:
```
runs/<run>/stream/admissions/<number>.json
```

| whoever is to admit the next prompts finds | and |
|---|---|
| no claim of that number | claims it, and makes its admission |
| a claim of its own admission | makes it |
| a claim of another one, which an earlier driver was about to make | makes that one first, as it was claimed |

So an admission that an earlier driver commits late meets the same one, and never takes a number that another has.
Claims stay, as commits do. Ledgers of earlier versions have none for the admissions that these made.
"""

import time
import uuid
from collections.abc import Sequence

from cairn.storage import canonical, layout
from cairn.storage.commits import Step
from cairn.storage.errors import Damaged, StoreError
from cairn.storage.ledger import Ledger
from cairn.storage.records import Record
from cairn.storage.store import Store


class Claim(Record):
    """What one admission is to be."""

    schema_version: int = 1
    run: str
    number: int
    """Among all of the run, from 0."""
    iteration: int
    """Where it is to be committed."""
    shard: str
    count: int
    """Prompts that are drawn."""
    without: tuple[int, ...]
    """Prompts that are passed over, as rows of the data set."""
    epoch: int
    """Of the driver that claimed it."""
    id: str
    """Random: a claim like no other."""
    claimed_at: float
    """Unix seconds."""

    @property
    def admission(self) -> str:
        """The name of its commit."""
        return layout.commit_name(self.iteration, Step.ADMIT, self.shard)


def claim_admission(
    ledger: Ledger, number: int, *, iteration: int, shard: str, count: int, without: Sequence[int]
) -> Claim:
    """Claim a number for an admission. Returns the claim that the ledger now has, which is that of another admission if
    that was first. Raises LeaseLost if this driver does not own the run any more, and Damaged."""
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
    if ledger.store.create(path, canonical.seal(claim.model_dump(mode="json")), ledger.require_held):
        return claim
    first = find_claim(ledger.store, ledger.run, number)
    if first is None:
        raise StoreError(f"{path} could not be created, yet it is not there")
    return first


def find_claim(store: Store, run: str, number: int) -> Claim | None:
    """The claim of an admission, or None. Raises Damaged."""
    path = layout.admission(run, number)
    try:
        return read_claim(store.read(path), path)
    except FileNotFoundError:
        return None


def read_claim(data: bytes, path: str) -> Claim:
    """The claim that lies at a path. Raises Damaged."""
    try:
        fields = canonical.unseal(data)
        del fields["digest"]
        claim = Claim.model_validate(fields)
    except ValueError as error:
        raise Damaged(f"{path} cannot be trusted: {error}") from None
    if path != layout.admission(claim.run, claim.number):
        raise Damaged(f"{path} belongs to another place: it says admission {claim.number} of run {claim.run!r}")
    return claim


def claimed_numbers(store: Store, run: str) -> list[int]:
    """The numbers of all admissions of a run that are claimed, in order. One listing."""
    names = store.list(layout.admissions(run))
    return [number for name in names if (number := layout.parse_admission(name)) is not None]


def newest_claim(store: Store, run: str) -> Claim | None:
    """The newest of a run: the one that may not be an admission yet. None without any. Raises Damaged."""
    numbers = claimed_numbers(store, run)
    return find_claim(store, run, numbers[-1]) if numbers else None
