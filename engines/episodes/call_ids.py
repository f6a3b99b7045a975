"""Which call of `ctx.sample` this is: the path of its asyncio task and a counter, so that calls that run side by side
have ids that do not depend on who comes first.

The first call of a sample is `0`, its next one `1`; of the first task that it starts `t0.0`, of that task's second
child `t0.t1.0`. Tasks are numbered as they are created, by the factory that the loop is given.
"""

import asyncio
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from cairn.engines.trajectories import SampleKey


@dataclass
class _Place:
    """A task of a sample."""

    sample: SampleKey
    path: str = ""
    calls: int = 0
    children: int = 0


_place: ContextVar[_Place] = ContextVar("place")
_samples: "WeakKeyDictionary[asyncio.Task[Any], SampleKey]" = WeakKeyDictionary()
"""Of the tasks that samples started."""


def begin_sample(key: SampleKey) -> None:
    """In the task of a sample: count its calls from here on."""
    _place.set(_Place(key))


def sample_of(task: "asyncio.Task[Any]") -> SampleKey | None:
    """The sample that started a task."""
    return _samples.get(task)


def next_call() -> str:
    """Id of the call that the running task makes now."""
    place = _place.get()
    place.calls += 1
    return f"{place.path}{place.calls - 1}"


def task_factory(loop: asyncio.AbstractEventLoop, coroutine: Any, /, **options: Any) -> "asyncio.Task[Any]":
    """Makes the tasks of a loop; a sample's own get a place below that of the task that creates them."""
    parent = _place.get(None)
    if parent is None:
        return asyncio.Task(coroutine, loop=loop, **options)
    context = options.pop("context", None) or copy_context()
    context.run(_place.set, _Place(parent.sample, f"{parent.path}t{parent.children}."))
    parent.children += 1
    task = asyncio.Task(coroutine, loop=loop, context=context, **options)
    _samples[task] = parent.sample
    return task
