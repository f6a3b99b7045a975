"""Weights by broadcast: the trainer's first rank and all processes of one engine are a process group.

The group is kept from one update to the next while both live; whoever comes back from the dead is in none, and a new
one is formed. Nobody waits for ever: whatever fails at one end, both leave the group, and what still waits for one who
left ends with an error.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from uuid import uuid4

import ray

from cairn.engines.errors import EngineDied, EngineError
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.handles import CONTROL, SENDING
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.weights.layout import Layout, Meeting, Receiver

Call = tuple[RolloutHandle | TrainingHandle, Any, str]
"""An engine, what its `submit` returned, and the method."""

Lane = Mapping[str, str]
"""Options of the trainer's calls: the concurrency group in which they wait for one another."""


def broadcast_live(
    source: TrainingHandle, target: RolloutHandle, version: int, bucket_bytes: int, timeout: float
) -> None:
    """Broadcast the weights of `version` to a target that has begun an update, each bucket within `timeout` seconds.

    Raises:
        WrongVersion: the source does not stand at `version`.
        EngineError: an engine died, hung or refused.
    """
    receiver: Receiver = target.call("receiver")
    backend = _backend(source, receiver)
    with closing(source.broadcast_weights(version, bucket_bytes, backend, target.name)) as buckets:
        _send(buckets, source, target, receiver, backend, timeout, {})


def broadcast_copies(source: TrainingHandle, target: RolloutHandle, copies: Sequence[Any], timeout: float) -> None:
    """The same of buckets in the object store, while the trainer goes on with what it does. Raises EngineError."""
    receiver: Receiver = target.call("receiver")
    backend = _backend(source, receiver)
    with closing(source.broadcast_copies(copies, backend, target.name)) as buckets:
        _send(buckets, source, target, receiver, backend, timeout, {"concurrency_group": SENDING})


def _backend(source: TrainingHandle, receiver: Receiver) -> str:
    return "nccl" if source.on_gpu and receiver.on_gpu else "gloo"


def _send(
    buckets: Iterable[tuple[Layout, Any]],
    source: TrainingHandle,
    target: RolloutHandle,
    receiver: Receiver,
    backend: str,
    timeout: float,
    lane: Lane,
) -> None:
    # Whoever fails leaves the group before the buckets are closed, or the trainer would not come to end its export.
    with _leaving_on_failure(source, target, timeout, lane):
        whole = (receiver.group, 1 + receiver.ranks)
        if source.finish(source.submit("group", target.name, **lane), "group") != whole:
            _meet(source, target, receiver, backend, timeout, lane)
        for layout, sending in buckets:
            receiving = target.submit("receive_weights", layout)
            _both([(target, receiving, "receive_weights"), (source, sending, "broadcast")], timeout)


@contextmanager
def _leaving_on_failure(source: TrainingHandle, target: RolloutHandle, timeout: float, lane: Lane) -> Iterator[None]:
    """Have both leave the group if what is done in it fails; where one of them died, its death is the error, even if
    the other was the first to miss it."""
    try:
        yield
    except BaseException as failure:
        _leave(source, target, timeout, lane)
        if isinstance(failure, EngineError) and not isinstance(failure, EngineDied):
            for engine in (source, target):
                try:
                    engine.health()
                except EngineDied as died:
                    raise died from failure
                except EngineError:
                    continue  # what it lacks is a consequence; the failure itself says more
        raise


def _meet(
    source: TrainingHandle, target: RolloutHandle, receiver: Receiver, backend: str, timeout: float, lane: Lane
) -> None:
    name = f"cairn-{uuid4().hex}"
    host, port = source.finish(source.submit("open_group", target.name, name, timeout, **lane), "open_group")
    size = 1 + receiver.ranks
    joining = source.submit("join_group", target.name, size, backend, **lane)
    meeting = Meeting(name, host, port, backend, size, rank=1)
    _both([(source, joining, "join_group"), (target, target.submit("join_group", meeting), "join_group")], timeout)


def _leave(source: TrainingHandle, target: RolloutHandle, timeout: float, lane: Lane) -> None:
    """Both leave the group, each as soon as its call under way has ended; one that does not is found out and replaced
    later, as any engine that hangs."""
    deadline = Deadline(timeout)
    with suppress(EngineError):
        released = source.submit("release_group", target.name, concurrency_group=CONTROL)
        source.finish(released, "release_group", deadline)
    calls: list[Call] = []
    with suppress(EngineError):
        calls.append((source, source.submit("leave_group", target.name, **lane), "leave_group"))
    with suppress(EngineError):
        calls.append((target, target.submit("leave_group"), "leave_group"))
    for engine, call, method in calls:
        with suppress(EngineError):
            engine.finish(call, method, deadline)


def _both(calls: Sequence[Call], timeout: float) -> None:
    """Wait for both calls; as soon as one of them fails, raise its error."""
    deadline = Deadline(timeout)
    left = list(calls)
    while left:
        ended, _ = ray.wait([call for _, call, _ in left], timeout=deadline.remaining)
        for engine, call, method in list(left):
            if call in ended or not ended:
                engine.finish(call, method, deadline)
                left.remove((engine, call, method))
