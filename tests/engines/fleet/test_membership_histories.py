"""Membership under any history of machines: whoever can serve serves, and all are told of whoever joins or leaves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cairn.configs.schema.operations import FleetConfig
from cairn.engines.fleet.membership import Elastic
from cairn.engines.types.errors import EngineDied

NUMBERS = st.integers(0, 2)
MACHINES = st.sampled_from(["a", "b", "c", None])


class Engine:
    """What a fleet knows of a rollout engine: whether it answers, and that it can be made."""

    def __init__(self, number: int) -> None:
        self.name = f"rollout-{number}"
        self.machine: str | None = "a"
        """Where its bundles are."""
        self.broken = False
        """Whether it cannot be made."""
        self.dead = False
        self.made = 0

    def nodes(self) -> set[str] | None:
        return None if self.machine is None else {self.machine}

    @contextmanager
    def alone(self) -> Iterator[None]:
        yield

    def start(self, deadline: object) -> None:
        if self.broken:
            raise EngineDied(f"{self.name} cannot be made")
        self.made += 1
        self.dead = False

    def require_alive(self) -> dict[str, Any]:
        if self.dead:
            raise EngineDied(f"{self.name} is dead")
        return {}


class Members(RuleBasedStateMachine):
    """Three engines, of which two must serve, on machines that come, are drained and go."""

    @initialize(machines=st.tuples(MACHINES, MACHINES, MACHINES))
    def begin(self, machines: tuple[str | None, ...]) -> None:
        self.drained: dict[str, int] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("cairn.engines.fleet.membership.draining", lambda: self.drained)
        self.patch.setattr("cairn.engines.fleet.membership.RETRY_INTERVAL", 0.0)
        self.engines = [Engine(number) for number in range(3)]
        for engine, machine in zip(self.engines, machines, strict=True):
            engine.machine = machine
        self.members = {engine for engine in self.engines if engine.machine is not None}
        self.made_on = {engine: engine.machine for engine in self.members}
        self.said: list[str] = []
        self.changes = 0
        nodes: Any = {engine: engine.nodes for engine in self.engines}
        self.membership = Elastic(nodes, 2, FleetConfig(start_timeout=600), self.said.append)
        self.membership.changed = self.change

    def teardown(self) -> None:
        self.patch.undo()

    def change(self) -> None:
        self.changes += 1

    @rule(number=NUMBERS, machine=MACHINES)
    def moves(self, number: int, machine: str | None) -> None:
        """Ray finds room elsewhere, or nowhere."""
        self.engines[number].machine = machine

    @rule(machine=st.sampled_from("abc"))
    def is_drained(self, machine: str) -> None:
        self.drained[machine] = 0

    @rule(machine=st.sampled_from("abc"))
    def stays_after_all(self, machine: str) -> None:
        self.drained.pop(machine, None)

    @rule(number=NUMBERS, broken=st.booleans())
    def can_be_made_or_not(self, number: int, broken: bool) -> None:
        self.engines[number].broken = broken

    @rule(number=NUMBERS)
    def dies_and_is_asked(self, number: int) -> None:
        engine: Any = self.engines[number]
        engine.dead = True
        with pytest.raises(EngineDied):
            self.membership.ensure_alive(engine)
        self.members.discard(engine)

    @rule(number=NUMBERS)
    def is_asked(self, number: int) -> None:
        engine: Any = self.engines[number]
        if engine in self.members:
            assert self.membership.ensure_alive(engine) == {}
        else:
            with pytest.raises(EngineDied, match="has left"):
                self.membership.ensure_alive(engine)

    @rule()
    def looks(self) -> None:
        """Once, until whoever joins has joined. What leaves at a look joins at a later one."""
        before, made = set(self.members), {engine: engine.made for engine in self.engines}
        self.membership._check()
        for thread in list(self.membership._joining.values()):
            thread.join()
        for engine in self.engines:
            fits = engine.machine is not None and engine.machine not in self.drained
            if engine in before:
                if engine.machine != self.made_on[engine] or not fits:
                    self.members.discard(engine)
                assert engine.made == made[engine]
            elif fits and not engine.broken:
                self.members.add(engine)
                self.made_on[engine] = engine.machine
                assert engine.made == made[engine] + 1

    @invariant()
    def whoever_can_serve_serves(self) -> None:
        result: list[Any] = self.membership.members
        assert result == [engine for engine in self.engines if engine in self.members]
        assert self.membership.enough() == (len(result) >= 2)

    @invariant()
    def every_change_is_told_once(self) -> None:
        reported = [sentence for sentence in self.said if "cannot join" not in sentence]
        assert len(reported) == self.changes
        joined = sum(" joins. " in sentence for sentence in reported)
        assert joined == sum(engine.made for engine in self.engines)
        count = f"{len(self.members)} of 3 rollout engines serve"
        assert not reported or any(sentence.endswith(count) for sentence in reported[-3:]), "three may join at once"


TestMembers = Members.TestCase
TestMembers.settings = settings(max_examples=40, stateful_step_count=20)
