"""Admissions of a stream under any history of two drivers: each is made as it was claimed first, and every group that
is admitted is taken once or open."""

import shutil
import tempfile
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.admissions import Claim, claim_admission, claimed_numbers, find_claim, newest_claim, open_groups
from cairn.storage.opening import open_store
from cairn.storage.store.errors import LeaseLost
from cairn.storage.upkeep.verification import verify
from tests.storage.builders import CONFIG, commit_step
from tests.storage.logs.test_admitted import taken

STREAMING = {**CONFIG, "rollout": {"pipeline": "streaming", "max_age": 2}}
DRIVERS = st.sampled_from([0, 1])


@dataclass
class Driver:
    """One that may have lost the run without knowing it."""

    ledger: Ledger
    claim: Claim | None = None
    """Groups of the admission to make."""


class Admissions(RuleBasedStateMachine):
    """Two drivers take the run from each other at any moment, and each goes on as if it owned it."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.store = open_store(self.folder)
        Ledger.create(self.store, "run-1", STREAMING)
        self.drivers = [Driver(Ledger.open(self.store, "run-1")) for _ in range(2)]
        self.claims: list[Claim] = []
        self.admitted: list[Commit] = []
        self.taken: list[Commit] = []
        self.open: set[int] = set()
        self.owner = 1
        self.takes_over(0)

    def teardown(self) -> None:
        findings = [finding.message for one in verify(self.drivers[0].ledger) for finding in one.findings]
        for driver in self.drivers:
            if driver.ledger.lease is not None:
                driver.ledger.lease._ended.set()
        shutil.rmtree(self.folder)
        assert not findings

    @rule(number=DRIVERS)
    def takes_over(self, number: int) -> None:
        self.drivers[number].ledger.acquire(takeover=True)
        self.drivers[number].claim = None
        self.owner = number

    @precondition(lambda self: len(self.claims) == len(self.admitted))
    @rule(count=st.integers(1, 3), shard=st.sampled_from(["00", "01"]))
    def claims_the_next(self, count: int, shard: str) -> None:
        number = len(self.admitted)
        claim = self.claim(self.owner, number, count, shard)
        assert (claim.number, claim.iteration, claim.shard, claim.count) == (number, number, shard, count)
        self.claims.append(claim)
        self.drivers[self.owner].claim = claim

    @precondition(lambda self: self.claims)
    @rule(count=st.integers(1, 3), shard=st.sampled_from(["00", "01"]), data=st.data())
    def finds_an_earlier_claim(self, count: int, shard: str, data: st.DataObject) -> None:
        """The owner, or a driver that comes back, wants to admit something else under a number that was claimed."""
        number = data.draw(st.integers(0, len(self.claims) - 1))
        found = self.claim(self.owner, number, count, shard)
        assert found == self.claims[number]
        if number == len(self.admitted):
            self.drivers[self.owner].claim = found

    @rule(count=st.integers(1, 3))
    def claims_too_late(self, count: int) -> None:
        """A driver that has lost the run, or never had it."""
        loser = self.drivers[1 - self.owner]
        if loser.ledger.lease is None or len(self.claims) > len(self.admitted):
            return
        with pytest.raises(LeaseLost):
            self.claim(1 - self.owner, len(self.admitted), count, "00")

    def claim(self, driver: int, number: int, count: int, shard: str) -> Claim:
        return claim_admission(
            self.drivers[driver].ledger, number, iteration=number, shard=shard, count=count, without=()
        )

    @rule(number=DRIVERS)
    def makes_its_admission(self, number: int) -> None:
        driver = self.drivers[number]
        claim, driver.claim = driver.claim, None
        if claim is None:
            return
        begin = sum(one.count for one in self.claims[: claim.number])
        groups = list(range(begin, begin + claim.count))
        values = {"groups": groups, "number": claim.number}
        if number != self.owner:
            # It may find the admission that its successor made, or learn that it owns the run no more.
            try:
                commit = commit_step(driver.ledger, claim.iteration, Step.ADMIT, claim.shard, values=values)
            except LeaseLost:
                return
            assert commit.values == values
            return
        commit = commit_step(driver.ledger, claim.iteration, Step.ADMIT, claim.shard, values=values)
        assert commit.values == values
        if claim.number == len(self.admitted):
            self.admitted.append(commit)
            self.open |= set(groups)

    @precondition(lambda self: len(self.taken) < len(self.admitted))
    @rule(data=st.data())
    def takes_groups(self, data: st.DataObject) -> None:
        groups = data.draw(
            st.lists(st.sampled_from(sorted(self.open)), min_size=1, unique=True) if self.open else st.just([])
        )
        if not groups:
            return
        self.open -= set(groups)
        left = {one.name: sorted(set(one.values["groups"]) & self.open) for one in self.admitted}  # type: ignore[arg-type]
        left = {name: ids for name, ids in left.items() if ids}
        ledger = self.drivers[self.owner].ledger
        self.taken.append(taken(ledger, len(self.taken), groups, self.admitted[-1], left))

    @invariant()
    def every_group_is_taken_or_open(self) -> None:
        for driver in self.drivers:
            assert open_groups(driver.ledger) == self.open

    @invariant()
    def claims_stay(self) -> None:
        assert claimed_numbers(self.store, "run-1") == list(range(len(self.claims)))
        assert [find_claim(self.store, "run-1", one.number) for one in self.claims[-2:]] == self.claims[-2:]
        assert newest_claim(self.store, "run-1") == (self.claims[-1] if self.claims else None)


TestAdmissions = Admissions.TestCase
TestAdmissions.settings = settings(max_examples=10, stateful_step_count=20)
