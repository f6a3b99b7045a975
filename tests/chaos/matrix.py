"""The matrix: step × moment × victim, and how it is laid out over runs. Plans beyond it: tests/chaos/plans.py.

A case is a fault. A plan is one run: a list of drivers, each with the faults that strike while it works. Victims that
the driver outlives strike one after the other under one driver, an iteration apart; those that end it have one driver
each, and the next goes on with the same run.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from cairn.flows.driver.signals import EXIT_CODE
from cairn.storage.ledger.commits import Step
from tests.chaos.commands import COMMANDS
from tests.chaos.faults import FAILED, AnyVictim, Fault, Moment, RareMoment, Victim, outages_met
from tests.chaos.runs import Disturbed

STEPS = tuple(step for step in Step if step is not Step.ADMIT)
"""Of a run that does not stream."""
MOMENTS: tuple[Moment, ...] = get_args(Moment)
VICTIMS: tuple[Victim, ...] = get_args(Victim)

EXITS: dict[AnyVictim, tuple[int, ...]] = {
    "driver": (-9,),
    "notice": (EXIT_CODE,),
    "ray": (1,),
    "database": (1,),
    "training": (0,),
    "rollout": (0,),
    "prefect": (0,),
    "store": (0,),
    "server": (0,),
    "stopped": (0,),
    "scheduler": (0,),
    "router": (0,),
    "rank": (0,),
    "hung": (0,),
    "grader": (0,),
    "update": (0,),
    "gc": (0,),
    "fork": (0,),
    "delete": (0,),
}
"""How a driver may end after the victim was struck; 0: with the run complete."""

NO_PROCESS = ("store", "update", *COMMANDS)
"""Victims whose fault ends no process."""

PREFECT_FAULTS = 3
"""As many in a row as a driver starts its server again."""


@dataclass(frozen=True)
class Driver:
    """One driver of a run and the faults that strike while it works."""

    faults: tuple[Fault, ...] = ()
    may_give_up: bool = False
    """Whether it may end with a sentence although it need not: nobody tries again what a fork's restore point needs."""

    @property
    def own_prefect(self) -> bool:
        return any(fault.victim in ("prefect", "database") for fault in self.faults)

    @property
    def exits(self) -> tuple[int, ...]:
        """How it may end: as the last fault has it, if that ends a driver. One whose engine dies at every try of a step
        may give up with a sentence."""
        if not self.faults:
            return (0,)
        repeated = len(set(self.faults)) < len(self.faults)
        return (0, 1) if repeated or self.may_give_up else EXITS[self.faults[-1].victim]


@dataclass(frozen=True)
class Plan:
    """One run."""

    name: str
    drivers: tuple[Driver, ...]
    configuration: str = "plain"

    @property
    def faults(self) -> list[Fault]:
        return [fault for driver in self.drivers for fault in driver.faults]

    @property
    def on_s3(self) -> bool:
        return any(fault.victim == "store" for fault in self.faults)


def case(iteration: int, step: Step, moment: Moment | RareMoment, victim: AnyVictim) -> Fault:
    return Fault(iteration, step, moment, victim)


Cell = tuple[str, Step, str, AnyVictim]
"""Configuration, step, moment and victim."""


def cells(plans: Iterable[Plan]) -> set[Cell]:
    """What the plans strike."""
    return {(plan.configuration, fault.step, fault.moment, fault.victim) for plan in plans for fault in plan.faults}


CI_SET = Plan(
    "ci",
    (
        Driver((case(0, Step.REWARD, "before", "store"), case(0, Step.TRAIN, "uncommitted", "driver"))),
        Driver((case(0, Step.SYNC, "before", "rollout"), case(1, Step.ADVANTAGE, "during", "ray"))),
        Driver(
            (
                case(1, Step.TRAIN, "during", "training"),
                case(1, Step.CHECKPOINT, "uncommitted", "training"),
                case(2, Step.FILTER, "after", "database"),
            )
        ),
        Driver(
            (
                case(3, Step.ROLLOUT, "during", "rollout"),
                case(3, Step.SCORE, "before", "prefect"),
                case(3, Step.EVAL, "before", "rollout"),
            )
        ),
    ),
)
"""Each step, each moment and each victim at least once, in one run."""


def every_case() -> list[Plan]:
    """Every step at every moment with every victim."""
    return [plan for victim in VICTIMS for plan in _plans(victim)]


def _plans(victim: Victim) -> Iterator[Plan]:
    if victim == "driver":
        faults = _faults(victim, {step: _where(step, (0, 1, 2, 2), (1, 1, 1, 1), (0, 0, 1, 1)) for step in STEPS})
        yield Plan(victim, _one_each(faults))
        return
    if victim == "ray":
        yield from _one_each_apart(victim)
        return
    faults = _faults(victim, {step: _where(step, (0, 1, 2, 3), (1, 3, 1, 3), (0, 1, 3, 1)) for step in STEPS})
    if victim == "store":
        yield Plan(victim, (Driver(tuple(faults)),))
        return
    survived = EXITS[victim] == (0,)
    for step in STEPS:
        # One an iteration: what was killed is started again when it is needed, and cannot be killed before; and a
        # driver whose database is lost may get to the end of its iteration, and collect the next one's batch.
        left, number = [fault for fault in faults if fault.step is step], 0
        while left:
            by_iteration = {fault.iteration: fault for fault in reversed(left)}
            chosen = sorted(by_iteration.values(), key=_position)[: PREFECT_FAULTS if survived else None]
            left = [fault for fault in left if fault not in chosen]
            yield Plan(f"{victim}-{step}-{number}", (Driver(tuple(chosen)),) if survived else _one_each(chosen))
            number += 1


_APART = (
    (Step.ROLLOUT, Step.SCORE, Step.TRAIN, Step.SYNC),
    (Step.FILTER, Step.ADVANTAGE),
    (Step.REWARD,),
)
"""Steps whose faults may be in one run although the driver goes on, until it next needs what it has lost: nothing that
one of them leads to in the meantime is struck in the same iteration."""


def _one_each_apart(victim: Victim) -> Iterator[Plan]:
    """Plans for a victim that the driver survives by a few steps: no two moments of a step are in one iteration."""
    for number, steps in enumerate(_APART):
        faults = [case(turn, step, moment, victim) for step in steps for turn, moment in enumerate(MOMENTS)]
        if number < 2:  # there are but two checkpoints, and two evaluations with something after them
            first, second = MOMENTS[number::2]
            faults += [case(1, Step.CHECKPOINT, first, victim), case(3, Step.CHECKPOINT, second, victim)]
            faults += [case(0, Step.EVAL, first, victim), case(1, Step.EVAL, second, victim)]
        yield Plan(f"{victim}-{number}", _one_each(sorted(faults, key=_position)))


def _one_each(faults: Sequence[Fault]) -> tuple[Driver, ...]:
    """A driver for each fault, and one that is left in peace."""
    return (*(Driver((fault,)) for fault in faults), Driver())


def _faults(victim: Victim, iterations: Mapping[Step, Sequence[int]]) -> list[Fault]:
    """Every step at every moment, in the order of a run."""
    faults = [
        case(iterations[step][turn], step, MOMENTS[turn], victim) for step in STEPS for turn in range(len(MOMENTS))
    ]
    return sorted(faults, key=_position)


def _where(step: Step, most: Sequence[int], checkpoints: Sequence[int], evals: Sequence[int]) -> Sequence[int]:
    """Iterations in which the step's four cases are, one a moment: those that have such a step."""
    return {Step.CHECKPOINT: checkpoints, Step.EVAL: evals}.get(step, most)


def _position(fault: Fault) -> tuple[int, int, int]:
    """Where the fault is on the way of a run; the first evaluation is before the first rollout."""
    first = fault.step is Step.EVAL and fault.iteration == 0
    return fault.iteration, -1 if first else STEPS.index(fault.step), MOMENTS.index(fault.moment)


def execute(plan: Plan, run: Disturbed) -> list[str]:
    """Do what the plan says; returns what went otherwise."""
    happened = 0
    for driver in plan.drivers:
        code = run.drive(driver.faults, own_prefect=driver.own_prefect)
        happened += len(driver.faults)
        struck = run.struck()
        named = " and ".join(map(str, driver.faults)) or "nothing"
        if len(struck) != happened:
            return [f"{named}: only {len(struck)} of {happened} happened; the driver ended with {code}\n{run.log()}"]
        if failed := [account for account in struck if account.get("came", "").startswith(FAILED)]:
            return [f"a command beside the driver failed: {failed}"]
        if spared := [account for account in struck if not account["pids"] and account["victim"] not in NO_PROCESS]:
            return [f"no such victim was there: {spared}\n{run.log()}"]
        if unmet := _unmet_outages(run, struck):
            return [f"no request met the outage: {unmet}\n{run.log()}"]
        if code not in driver.exits:
            return [f"{named}: the driver ended with {code}\n{run.log()}"]
        if left := run.left_behind(engines=code == 0):
            return [f"{named}: left behind {left}"]
    return []


def _unmet_outages(run: Disturbed, struck: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The accounts of outages of the store that no request met before the next one, or before the driver's end."""
    outages = [account for account in struck if account["victim"] == "store"]
    if not outages:
        return []
    later = [account["met_before"] for account in outages[1:]] + [outages_met(run.environment["AWS_ENDPOINT_URL"])]
    return [account for account, met in zip(outages, later, strict=True) if met == account["met_before"]]
