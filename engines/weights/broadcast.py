"""Weights by broadcast: the trainer's first rank and all processes of one engine are a process group.

The group is kept from one update to the next while both live; whoever comes back from the dead is in none, and a new
one is formed. Nobody waits for ever: whatever fails at one end, both leave the group, and what still waits for one who
left ends with an error.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any
from uuid import uuid4

import ray

from cairn.engines.errors import EngineDied, EngineError
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.handles import CONTROL
from cairn.engines.fleet.rollout import RolloutHandle
from cairn.engines.fleet.training import TrainingHandle
from cairn.engines.weights.layout import Meeting, Receiver

Call = tuple[RolloutHandle | TrainingHandle, Any, str]
"""An engine, what its `submit` returned, and the method."""


def send_broadcast(
    source: TrainingHandle, target: RolloutHandle, version: int, bucket_bytes: int, timeout: float
) -> None:
    """Broadcast the weights of `version` to a target that has begun an update, each bucket within `timeout` seconds.

    Raises:
        WrongVersion: the source does not stand at `version`.
        EngineError: an engine died, hung or refused.
    """
    receiver: Receiver = target.call("receiver")
    backend = "nccl" if source.on_gpu and receiver.on_gpu else "gloo"
    with (
        closing(source.broadcast_weights(version, bucket_bytes, backend, target.name)) as buckets,
        _leaving_on_failure(source, target, timeout),  # first, or the trainer would not come to end its export
    ):
        whole = (receiver.group, 1 + receiver.ranks)
        if source.finish(source.submit("group", target.name), "group") != whole:
            _meet(source, target, receiver, backend, timeout)
        for layout, sending in buckets:
            receiving = target.submit("receive_weights", layout)
            _both([(target, receiving, "receive_weights"), (source, sending, "broadcast_bucket")], timeout)


@contextmanager
def _leaving_on_failure(source: TrainingHandle, target: RolloutHandle, timeout: float) -> Iterator[None]:
    """Have both leave the group if what is done in it fails; where one of them died, its death is the error, even if
    the other was the first to miss it."""
    try:
        yield
    except BaseException as failure:
        _leave(source, target, timeout)
        if isinstance(failure, EngineError) and not isinstance(failure, EngineDied):
            for engine in (source, target):
                try:
                    engine.health()
                except EngineDied as died:
                    raise died from failure
                except EngineError:
                    continue  # what it lacks is a consequence; the failure itself says more
        raise


def _meet(source: TrainingHandle, target: RolloutHandle, receiver: Receiver, backend: str, timeout: float) -> None:
    name = f"cairn-{uuid4().hex}"
    host, port = source.finish(source.submit("open_group", target.name, name, timeout), "open_group")
    size = 1 + receiver.ranks
    joining = source.submit("join_group", target.name, size, backend)
    meeting = Meeting(name, host, port, backend, size, rank=1)
    _both([(source, joining, "join_group"), (target, target.submit("join_group", meeting), "join_group")], timeout)


def _leave(source: TrainingHandle, target: RolloutHandle, timeout: float) -> None:
    """Both leave the group, each as soon as its call under way has ended; one that does not is found out and replaced
    later, as any engine that hangs."""
    deadline = Deadline(timeout)
    with suppress(EngineError):
        released = source.submit("release_group", target.name, concurrency_group=CONTROL)
        source.finish(released, "release_group", deadline)
    calls: list[Call] = []
    with suppress(EngineError):
        calls.append((source, source.submit("leave_group", target.name), "leave_group"))
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
