"""Which call of a sample's code this is: the path of its asyncio task and a counter, so that calls that run side by
side have ids that do not depend on who comes first.

Each kind of call counts for itself. A sample's first call of the policy is `0`, its next one `1`, of the first task
that it starts `t0.0`, of that task's second child `t0.t1.0`; its calls of tools are `c0`, `c1`, …, of graders `j0`, of
the clock `n0`, and what it draws by chance `r0`. Tasks are numbered as they are created, by the factory that the loop
is given.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from cairn.engines.trajectories import SampleKey


@dataclass
class _Place:
    """A task of a sample."""

    sample: SampleKey
    tasks: "WeakSet[asyncio.Task[Any]]"
    """All of the sample."""
    path: str = ""
    calls: Counter[str] = field(default_factory=Counter)
    children: int = 0
    aside: bool = False
    """Whether it carries out a call: a replay, which is given the answer, counts none of it."""


_place: ContextVar[_Place] = ContextVar("place")
_samples: "WeakKeyDictionary[asyncio.Task[Any], SampleKey]" = WeakKeyDictionary()
"""Of their tasks, and of those that their calls started."""


def begin_sample(key: SampleKey) -> "WeakSet[asyncio.Task[Any]]":
    """In the task of a sample: count its calls from here on. Returns its tasks, this one and those that it will have
    started."""
    task = asyncio.current_task()
    assert task is not None
    tasks = WeakSet([task])
    _place.set(_Place(key, tasks))
    _samples[task] = key
    return tasks


def alone(key: SampleKey) -> Context:
    """Where the code of a sample runs that starts no task: what it calls there counts as the sample's."""
    context = copy_context()
    context.run(_place.set, _Place(key, WeakSet()))
    return context


def sample_of(task: "asyncio.Task[Any]") -> SampleKey | None:
    """The sample that a task is at work for."""
    return _samples.get(task)


def sample_in(context: Context) -> SampleKey | None:
    """The sample whose code runs in a context."""
    place = context.get(_place)
    return None if place is None else place.sample


@contextmanager
def aside() -> Iterator[None]:
    """In a task of a sample: what is started meanwhile is the sample's, but no part of its code."""
    own = _place.get()
    before = _place.set(_Place(own.sample, own.tasks, aside=True))
    try:
        yield
    finally:
        _place.reset(before)


class Part:
    """Of a sample's code one that tasks of others carry out, such as those of a server. Its calls are counted as those
    of a task that the running one starts, and below it by names, so that their ids do not depend on who comes first."""

    def __init__(self) -> None:
        self._place = _place.get()
        self._path = f"{self._place.path}t{self._place.children}."
        self._place.children += 1
        self._named: dict[str, _Place] = {}

    @contextmanager
    def named(self, name: str) -> Iterator[str]:
        """In whatever task: what it calls meanwhile is the sample's, the calls of a name one after the other. Yields
        the id of the next one."""
        task = asyncio.current_task()
        assert task is not None
        own = self._place
        place = self._named.setdefault(name, _Place(own.sample, own.tasks, f"{self._path}{name}."))
        _samples[task] = own.sample
        own.tasks.add(task)
        before = _place.set(place)
        try:
            yield f"{place.path}{place.calls['']}"
        finally:
            _place.reset(before)
            own.tasks.discard(task)


def next_call(kind: str = "") -> str:
    """Id of the call that the running task makes now. `kind`: the letter of its kind. Raises RuntimeError within
    another call."""
    place = _place.get()
    if place.aside:
        raise RuntimeError("a tool or a grader cannot ask the context: a replay, which has its answer, would not ask")
    place.calls[kind] += 1
    return f"{place.path}{kind}{place.calls[kind] - 1}"


def task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> "asyncio.Task[Any]":
    """Makes the tasks of a loop; a sample's own get a place below that of the task that creates them."""
    parent = _place.get(None)
    if parent is None or parent.aside:
        task = asyncio.Task(coroutine, loop=loop, **options)
        if parent is not None:
            _samples[task] = parent.sample
        return task
    context = options.pop("context", None) or copy_context()
    context.run(_place.set, _Place(parent.sample, parent.tasks, f"{parent.path}t{parent.children}."))
    parent.children += 1
    task = asyncio.Task(coroutine, loop=loop, context=context, **options)
    _samples[task] = parent.sample
    parent.tasks.add(task)
    return task
