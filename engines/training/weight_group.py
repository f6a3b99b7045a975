"""The sender's side of a process group with the servers that receive its weights. The sender has rank 0."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
from torch import distributed
from torch.distributed.distributed_c10d import (
    Backend,
    GroupName,
    PrefixStore,
    _new_process_group_helper,
    _set_pg_timeout,
    _world,
)

from cairn.engines.types.errors import EngineError, EngineTimeout
from cairn.engines.weights.buckets import in_one_storage
from cairn.engines.weights.layout import Layout

LOOK_INTERVAL = 0.0005
"""Seconds between two checks of a running broadcast."""


PATIENCE = 600.0
"""Seconds that PyTorch's own NCCL watchdog waits longer than we do. The watchdog would end the whole process; we end
only the broadcast. Over gloo only its own timeout ends a broadcast."""


class SendingGroup:
    """A process group for weights, from opening the address where its members meet to its end.

    Args:
        name: unique among the groups of these members.
        host: address of this machine that the receivers can reach.
        timeout: deadline in seconds of the meeting and of each broadcast.
    """

    def __init__(self, name: str, host: str, timeout: float) -> None:
        self.name = name
        self.size = 0
        """Number of members, the sender included; 0 until all have met."""
        self._host, self._timeout = host, timeout
        self._meeting: distributed.TCPStore | None = distributed.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        self.port: int = self._meeting.port
        self._group: Any = None
        self._blocked = False
        """Whether a thread still waits for members that did not come to the first broadcast."""

    def join(self, size: int, backend: str) -> None:
        """Wait for all members. Raises EngineError where a member does not join or the group is released."""
        timeout = timedelta(seconds=self._timeout)
        try:
            store = distributed.TCPStore(self._host, self.port, is_master=False, timeout=timeout)
            # PyTorch's public function creates groups inside a default group, which the servers do not share with us.
            # They join with this function, and its keys in the store must be the same.
            self._group, _ = _new_process_group_helper(
                size,
                0,
                [],
                Backend(backend),
                PrefixStore(self.name, store),
                group_name=GroupName(self.name),
                timeout=timeout,
            )
            _world.pg_group_ranks[self._group] = {rank: rank for rank in range(size)}
            if backend == "nccl":
                _set_pg_timeout(timedelta(seconds=self._timeout + PATIENCE), self._group)
        except (RuntimeError, ValueError) as error:
            raise EngineError(f"the receivers of the weights did not connect to the trainer: {error}") from error
        self.size = size

    def send(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor.

        Raises EngineError where a receiver is gone, and EngineTimeout where one does not receive it in time.
        """
        deadline = time.monotonic() + self._timeout
        try:
            work = self._within_timeout(lambda: self._group.broadcast([tensor], distributed.BroadcastOptions()), tensor)
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise EngineTimeout(f"a receiver did not take its weights within {self._timeout:g} s")
                time.sleep(LOOK_INTERVAL)
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a receiver of the weights is gone: {error}") from error

    def release(self) -> None:
        """Release all members that wait for others to join, in this process and elsewhere. Safe from any thread."""
        self._meeting = None

    def leave(self) -> None:
        """Close the connections. This also releases receivers that wait for a broadcast."""
        self.release()
        if self._blocked:  # an abort could wait for the same members
            Thread(target=self._group.abort, daemon=True).start()
            self._group, self.size = None, 0
        if self._group is not None:
            self._group.abort()
            distributed.destroy_process_group(self._group)
            self._group, self.size = None, 0

    def _within_timeout(self, start: Callable[[], Any], tensor: torch.Tensor) -> Any:
        """Return what starts a broadcast. Over NCCL the first one connects all members, and waits for them without a
        deadline of its own, so a thread does it. Raises EngineTimeout."""
        started: Future[Any] = Future()

        def run() -> None:
            try:
                with torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext():
                    started.set_result(start())
            except BaseException as error:
                started.set_exception(error)

        Thread(target=run, name="broadcast", daemon=True).start()
        try:
            return started.result(self._timeout)
        except TimeoutError:
            self._blocked = True
            raise EngineTimeout(
                f"the receivers of the weights did not connect to the trainer within {self._timeout:g} s"
            ) from None


def flatten(named_tensors: Mapping[str, torch.Tensor], device: torch.device) -> tuple[Layout, torch.Tensor]:
    """Return the layout and one tensor of bytes on a device, without gaps, in the form of a bucket for SGLang's
    servers."""
    bucket = in_one_storage(named_tensors, device)
    assert bucket.storage is not None
    ordered = sorted(bucket.entries, key=lambda entry: -entry[1].itemsize)
    return [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in ordered], bucket.storage
