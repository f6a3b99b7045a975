"""Weights by broadcast: the trainer's first rank and all processes of the servers are one process group.

The group is kept from one update to the next while its members are the same; whoever comes back from the dead is in
none, and a new one is formed. Nobody waits for ever: whatever fails at one end, all leave the group, and what still
waits for one who left ends with an error.
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


def send_broadcasts(
    source: TrainingHandle, targets: Sequence[RolloutHandle], version: int, bucket_bytes: int, timeout: float
) -> None:
    """Broadcast the weights of `version` to targets that have begun an update, each bucket within `timeout` seconds.

    Raises:
        WrongVersion: the source does not stand at `version`.
        EngineError: an engine died, hung or refused.
    """
    receivers: list[Receiver] = _all_of(
        [(target, target.submit("receiver"), "receiver") for target in targets], timeout
    )
    backend = "nccl" if source.on_gpu and all(receiver.on_gpu for receiver in receivers) else "gloo"
    with (
        closing(source.broadcast_weights(version, bucket_bytes, backend)) as buckets,
        _leaving_on_failure(source, targets, timeout),  # first, or the trainer would not come to end its export
    ):
        if not _is_whole(source, receivers):
            _meet(source, targets, receivers, backend, timeout)
        for layout, sending in buckets:
            calls: list[Call] = [
                (target, target.submit("receive_weights", layout), "receive_weights") for target in targets
            ]
            _all_of([*calls, (source, sending, "broadcast_bucket")], timeout)


@contextmanager
def _leaving_on_failure(source: TrainingHandle, targets: Sequence[RolloutHandle], timeout: float) -> Iterator[None]:
    """Have all leave the group if what is done in it fails; where a member died, its death is the error, whoever of the
    others was the first to miss it."""
    try:
        yield
    except BaseException as failure:
        _leave(source, targets, timeout)
        if isinstance(failure, EngineError) and not isinstance(failure, EngineDied):
            for engine in (source, *targets):
                try:
                    engine.health()
                except EngineDied as died:
                    raise died from failure
                except EngineError:
                    continue  # what it lacks is a consequence; the failure itself says more
        raise


def _is_whole(source: TrainingHandle, receivers: Sequence[Receiver]) -> bool:
    """Whether the trainer and these receivers, and nobody else, are in one group."""
    names = {receiver.group for receiver in receivers}
    return source.finish(source.submit("group"), "group") == (*names, 1 + sum(each.ranks for each in receivers))


def _meet(
    source: TrainingHandle,
    targets: Sequence[RolloutHandle],
    receivers: Sequence[Receiver],
    backend: str,
    timeout: float,
) -> None:
    name = f"cairn-{uuid4().hex}"
    host, port = source.finish(source.submit("open_group", name, timeout), "open_group")
    size = 1 + sum(receiver.ranks for receiver in receivers)
    calls: list[Call] = [(source, source.submit("join_group", size, backend), "join_group")]
    rank = 1
    for target, receiver in zip(targets, receivers, strict=True):
        meeting = Meeting(name, host, port, backend, size, rank)
        calls.append((target, target.submit("join_group", meeting), "join_group"))
        rank += receiver.ranks
    _all_of(calls, timeout)


def _leave(source: TrainingHandle, targets: Sequence[RolloutHandle], timeout: float) -> None:
    """All leave the group, each as soon as its call under way has ended; one that does not is found out and replaced
    later, as any engine that hangs."""
    deadline = Deadline(timeout)
    with suppress(EngineError):
        released = source.submit("release_group", concurrency_group=CONTROL)
        source.finish(released, "release_group", deadline)
    calls: list[Call] = []
    members: list[RolloutHandle | TrainingHandle] = [source, *targets]
    for engine in members:
        with suppress(EngineError):
            calls.append((engine, engine.submit("leave_group"), "leave_group"))
    for engine, call, method in calls:
        with suppress(EngineError):
            engine.finish(call, method, deadline)


def _all_of(calls: Sequence[Call], timeout: float) -> list[Any]:
    """The results of all calls; as soon as one of them fails, its error."""
    deadline = Deadline(timeout)
    found: dict[int, Any] = {}
    while len(found) < len(calls):
        left = [call for index, (_, call, _) in enumerate(calls) if index not in found]
        ended, _ = ray.wait(left, timeout=deadline.remaining)
        for index, (engine, call, method) in enumerate(calls):
            if index not in found and (call in ended or not ended):
                found[index] = engine.finish(call, method, deadline)
    return [found[index] for index in range(len(calls))]
