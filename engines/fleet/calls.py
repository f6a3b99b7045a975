"""Waiting for actors: every wait has a deadline, and every failure becomes one of the engines' own errors."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from cairn.engines.fleet.cluster import ray_folder, require_cluster
from cairn.engines.fleet.object_store import FULL, no_room
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout

CHECK_INTERVAL = 2.0
"""Seconds within which a waiting caller notices that the cluster was given up."""

Engine = TypeVar("Engine")
Value = TypeVar("Value")


class Deadline:
    """A moment at which waiting ends."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def restart(self) -> None:
        """Restart the deadline with the initial number of seconds."""
        self._end = time.monotonic() + self.seconds

    @property
    def remaining(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._end - time.monotonic())


def put(value: Value) -> Value:
    """Put the value into the object store. Returns its reference, as an argument of calls: Ray passes the value. Raises
    ClusterLost and NoSpace."""
    require_cluster()
    try:
        return cast(Value, ray.put(value))
    except FULL as error:
        raise no_room("the driver", ray_folder()) from error


def wait(refs: "Sequence[Any]", seconds: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
    """Return the calls that ended and those that did not, as soon as at least `num_returns` ended or the seconds are
    over. Raises ClusterLost."""
    deadline = Deadline(seconds)
    while True:
        require_cluster()
        ended, running = ray.wait(
            list(refs), num_returns=num_returns, timeout=min(CHECK_INTERVAL, deadline.remaining), fetch_local=False
        )
        if len(ended) >= num_returns or not deadline.remaining:
            # All that have ended: a caller that waits for many does not ask again for each of them.
            more, running = (
                ray.wait(running, num_returns=len(running), timeout=0, fetch_local=False) if running else ([], [])
            )
            return [*ended, *more], running


def result(ref: "ray.ObjectRef[Any]", deadline: Deadline, call: str) -> Any:
    """Return the result of an actor call.

    Raises:
        EngineTimeout: the result did not come in time.
        EngineDied: the actor is gone or out of reach. Whether it executed the call is unknown.
        ClusterLost: all actors are gone or out of reach.
        NoSpace: the object store has no room.
        Exception: the engine's own error, with the actor's traceback as its cause.
    """
    wait([ref], deadline.remaining)
    try:
        return ray.get(ref, timeout=deadline.remaining)
    except GetTimeoutError:
        require_cluster()
        raise EngineTimeout(f"{call} did not return within {deadline.seconds:g} s") from None
    except RayTaskError as error:
        if isinstance(error.cause, FULL):
            raise no_room(call, ray_folder()) from error
        if isinstance(error.cause, RayError) or not isinstance(error.cause, Exception):
            raise EngineError(f"{call} failed: {error}") from error
        raise error.cause from error
    except RayActorError as error:
        require_cluster()
        raise EngineDied(f"{call}: the actor's process is gone or out of reach. {_reason(error)}") from error
    except FULL as error:
        raise no_room(call, ray_folder()) from error
    except RayError as error:
        require_cluster()
        raise EngineError(f"{call} failed: {error}") from error


def map_in_threads(engines: Sequence[Engine], work: Callable[[Engine], Value]) -> list[Value]:
    """Call `work` with each engine, each in a thread of its own, and return the results. Raises the first failure once
    all have ended."""
    with ThreadPoolExecutor(max(1, len(engines))) as pool:
        return list(pool.map(work, engines))


def _reason(error: RayActorError) -> str:
    """Return how the process ended: the last line of Ray's message, without the general advice at its end."""
    *_, last = str(error).strip().splitlines() or [type(error).__name__]
    return last.partition(" Some common causes include")[0]
