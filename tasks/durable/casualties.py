"""What an engine had before it when it was lost, for a prompt that ends its engine every time to be found.

An engine that dies or falls silent does not say over what: machines kill processes too, so no group is blamed and none
fails. But a group that was unfinished each time within a step may be what ends it. From the second loss on the error
says so, and the last of these errors ends the run. From one loss to the next a step gives its requests in the opposite
order, so that what stood behind such a prompt is finished and durable, and drops out.

An engine that did not end in time was not killed by a machine: where that happens `HUNG` times while nothing but one
group was unfinished, it is the group, and its unfinished samples fail. So the step ends without them.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cairn.engines.rollout.plan import kind_of
from cairn.storage.ledger.commits import Step

HUNG = 2
"""Times that an engine may not end in time over a group alone."""
_SHOWN = 8
"""Rows that are named; of more it cannot be told which."""


class Place(NamedTuple):
    """Where an engine was lost."""

    run: str
    iteration: int
    step: str
    engine: str
    """`rollout.engine`."""


class Casualties:
    """By step, how often an engine was lost under this driver, and the groups that were unfinished each time.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: dict[str, tuple[int, frozenset[int]]] = {}
        self._hung: Counter[tuple[str, int]] = Counter()

    def add(self, step: str, unfinished: Iterable[int], *, hung: bool = False) -> None:
        """Record that an engine was lost before it had finished these groups.

        Args:
            step: the name that the step's commit will have, here and below.
            unfinished: ids of groups.
            hung: the engine did not end in time.
        """
        unfinished = list(unfinished)
        with self._lock:
            if hung and len(unfinished) == 1:
                self._hung[step, unfinished[0]] += 1
            times, before = self._lost.get(step, (0, None))
            ids = frozenset(unfinished)
            self._lost[step] = times + 1, ids if before is None else ids & before

    def times(self, step: str) -> int:
        """How often an engine was lost within the step."""
        with self._lock:
            return self._lost.get(step, (0, None))[0]

    def blamed(self, step: str, group: int) -> str | None:
        """The error of the samples of a group that is not to be tried again; None for all others."""
        with self._lock:
            times = self._hung[step, group]
        return f"EngineTimeout: an engine did not end in time {times} times over it alone" if times >= HUNG else None

    def explain(self, step: str, error: Exception, rows: Mapping[int, int], place: "Place") -> str:
        """The error's message, with what was there each time if there was another loss before. `rows`: of the data, by
        the group's id."""
        with self._lock:
            times, ids = self._lost.get(step, (0, frozenset()))
        if times < 2:
            return str(error)
        told = f"{error}. Within {step} an engine was lost {times} times"
        if not ids:
            return f"{told}, with no prompt that was unfinished each time"
        data = "the benchmark's data" if place.step == Step.EVAL else "data.path"
        fewer = kind_of(place.engine).bounded_by
        given, before = _spell(sorted(rows[id] + 1 for id in ids)), place.iteration - 1
        where = f"a fork (`cairn fork {place.run}@{before} NEW --set …`)" if before >= 0 else "a new run"
        return (
            f"{told}, each time with {given} of {data} unfinished (counted from 1): "
            "if it is a prompt that ends it, leave its row out of the data, or have fewer samples generated at a time "
            f"({fewer}), in {where}"
        )


def _spell(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_SHOWN]))
    more = f" and {len(rows) - _SHOWN} others" if len(rows) > _SHOWN else ""
    return f"row{'s' * (len(rows) > 1)} {shown}{more}"
