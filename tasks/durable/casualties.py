"""Records of lost engines, to find a prompt that ends its engine every time.

An engine that dies or falls silent does not report which request caused it. Machines kill processes too, so a loss
alone blames no group and fails none. But a group that was unfinished at every loss within a step may be the cause. From
the second loss on the error names these groups, and the last of these errors ends the run. After each loss the step
reverses the order of its requests. So the groups that were queued behind such a prompt finish, become durable and are
no longer suspects.

An engine that did not end in time was not killed by its machine. If that happens `HUNG` times with one and the same
group as the only unfinished one, that group is the cause: its unfinished samples fail, and the step ends without them.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cairn.engines.rollout.plan import kind_of
from cairn.storage.ledger.commits import Step

HUNG = 2
"""Timeouts of an engine over one group alone after which that group is blamed."""
_SHOWN = 8
"""Largest number of rows that an error names. With more rows the cause cannot be singled out."""


class Place(NamedTuple):
    """Place where an engine was lost."""

    run: str
    iteration: int
    step: str
    engine: str
    """Value of `rollout.engine`."""


class Casualties:
    """Number of engine losses under this driver and the groups that were unfinished at every one, by step.
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
            hung: whether the engine did not end in time.
        """
        unfinished = list(unfinished)
        with self._lock:
            if hung and len(unfinished) == 1:
                self._hung[step, unfinished[0]] += 1
            times, before = self._lost.get(step, (0, None))
            ids = frozenset(unfinished)
            self._lost[step] = times + 1, ids if before is None else ids & before

    def times(self, step: str) -> int:
        """Return how often an engine was lost within the step."""
        with self._lock:
            return self._lost.get(step, (0, None))[0]

    def blamed(self, step: str, group: int) -> str | None:
        """Return the error for the samples of a group that must not be tried again; None for any other group."""
        with self._lock:
            times = self._hung[step, group]
        return (
            f"EngineTimeout: an engine exceeded its timeout {times} times on this group alone"
            if times >= HUNG
            else None
        )

    def explain(self, step: str, error: Exception, rows: Mapping[int, int], place: "Place") -> str:
        """Return the error's message. From the second loss on it names the prompts that were unfinished each time.
        `rows` maps the id of a group to its row in the data."""
        with self._lock:
            times, ids = self._lost.get(step, (0, frozenset()))
        if times < 2:
            return str(error)
        message = f"{error}. Within {step} an engine was lost {times} times"
        if not ids:
            return f"{message}, but no prompt was unfinished each time"
        data = "the benchmark's data" if place.step == Step.EVAL else "data.path"
        fewer = kind_of(place.engine).bounded_by
        shown, before = _spell(sorted(rows[id] + 1 for id in ids)), place.iteration - 1
        where = f"a fork (`cairn fork {place.run}@{before} NEW --set …`)" if before >= 0 else "a new run"
        return (
            f"{message}, each time with {shown} of {data} unfinished (counted from 1): "
            "if one of these prompts crashes the engine, remove its row from the data, or generate fewer samples at a "
            f"time ({fewer}), in {where}"
        )


def _spell(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_SHOWN]))
    more = f" and {len(rows) - _SHOWN} others" if len(rows) > _SHOWN else ""
    return f"row{'s' * (len(rows) > 1)} {shown}{more}"
