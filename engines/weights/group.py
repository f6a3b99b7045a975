"""The sender's end of a process group with the servers that take its weights. The sender is rank 0."""

import time
from datetime import timedelta
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

from cairn.engines.errors import EngineError, EngineTimeout
from cairn.engines.weights.layout import Layout

LOOK_INTERVAL = 0.0005
"""Seconds between two looks at a broadcast that is under way."""

PATIENCE = 600.0
"""Seconds by which PyTorch's own watch over NCCL waits longer than we do: it would end the whole process, where we end
the broadcast. Over gloo nothing but its deadline ends one."""


class SendingGroup:
    """One group, from the address at which its members meet to its end.

    Args:
        name: of no other group of these members.
        host: address of this machine that the receivers reach.
        timeout: seconds that the meeting, and each broadcast, may take.
    """

    def __init__(self, name: str, host: str, timeout: float) -> None:
        self.name = name
        self.size = 0
        """Members, the sender included; 0 until all have met."""
        self._host, self._timeout = host, timeout
        self._meeting: distributed.TCPStore | None = distributed.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
        self.port: int = self._meeting.port
        self._group: Any = None

    def join(self, size: int, backend: str) -> None:
        """Wait for all members. Raises EngineError where one of them stays away or the group is released."""
        timeout = timedelta(seconds=self._timeout)
        try:
            store = distributed.TCPStore(self._host, self.port, is_master=False, timeout=timeout)
            # PyTorch's public function makes groups inside of a default group, which the servers do not share with us;
            # they join by this one, and its keys in the store must be the same.
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
            raise EngineError(f"the receivers of the weights did not meet the trainer: {error}") from error
        self.size = size

    def send(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor. Raises EngineError where a receiver is gone, EngineTimeout where one does not take it."""
        deadline = time.monotonic() + self._timeout
        try:
            work = self._group.broadcast([tensor], distributed.BroadcastOptions())
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise EngineTimeout(f"a receiver did not take its weights within {self._timeout:g} s")
                time.sleep(LOOK_INTERVAL)
            work.wait()
        except RuntimeError as error:
            raise EngineError(f"a receiver of the weights is gone: {error}") from error

    def release(self) -> None:
        """Free all who wait for others to join, in this process and elsewhere. Called from any thread."""
        self._meeting = None

    def leave(self) -> None:
        """Close the connections: who waits for a broadcast at another end is freed by that."""
        self.release()
        if self._group is not None:
            self._group.abort()
            distributed.destroy_process_group(self._group)
            self._group, self.size = None, 0


def flatten(named_tensors: dict[str, torch.Tensor]) -> tuple[Layout, torch.Tensor]:
    """One tensor of bytes, and what it holds: as SGLang's servers take a bucket, without gaps.

    Wider numbers come first, so that every tensor begins at a multiple of its numbers' width.
    """
    ordered = sorted(named_tensors.items(), key=lambda item: -item[1].element_size())
    layout = [(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in ordered]
    return layout, torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in ordered])
