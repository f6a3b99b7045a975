"""Reading of a batch by the ranks of a training engine: `cairn.engines.types.batches`."""

import pickle
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from cairn.engines.training.batching import check_batch
from cairn.engines.training.process import gathered
from cairn.engines.types.batches import BatchOutline, BatchReader
from cairn.engines.types.errors import EngineError
from cairn.engines.types.types import TrainBatch

Made = TypeVar("Made")


class Rows:
    """The ranks among which the rows of batches are exchanged, on the hosts. All ranks call its methods together.

    Whatever one rank raises, all ranks raise: nothing has changed then, and none waits for a rank that failed.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
        self._rank, self._world_size, self._device, self._timeout = rank, world_size, device, timeout
        self._group: dist.ProcessGroup | None = None

    def outline(self, reader: BatchReader) -> BatchOutline:
        """Return the outline of a batch, of which each rank reads some parts."""
        parts = range(self._rank, reader.parts, self._world_size)
        own = self.together(lambda: {part: reader.sizes(part) for part in parts})
        sizes = {part: size for one in self._gathered(own) for part, size in one.items()}
        return reader.outline([sizes[part] for part in range(reader.parts)])

    def read(self, reader: BatchReader, own: Collection[int]) -> TrainBatch:
        """Return a batch with this rank's sequences. Each rank reads a part and sends it on before the next.

        Raises ValueError where a sequence is inconsistent.
        """
        wanted = self._gathered(own)
        received: list[Any] = []
        for first in range(0, reader.parts, self._world_size):
            rows = self.together(partial(self._rows, reader, first + self._rank, wanted))
            received += [one for one in self._exchanged(rows) if one is not None]

        def checked() -> TrainBatch:
            batch = reader.batch(received, own)
            check_batch(batch, own)
            return batch

        return self.together(checked)

    def together(self, make: Callable[[], Made]) -> Made:
        """Return what `make` returns on this rank. Raises on all ranks the first error of any."""
        try:
            made, error = make(), None
        except Exception as failure:
            error = failure
        if self._world_size == 1:
            if error is not None:
                raise error
            return made
        first = next((one for one in self._gathered(error and _sendable(error)) if one is not None), None)
        if first is not None:
            raise first from error
        return made

    def _rows(self, reader: BatchReader, part: int, wanted: Sequence[Collection[int]]) -> list[Any]:
        return reader.rows(part, wanted) if part < reader.parts else [None] * self._world_size

    def _gathered(self, value: Any) -> list[Any]:
        return gathered(value, self._world_size, self._hosts())

    def _exchanged(self, values: Sequence[Any]) -> list[Any]:
        """Send each rank its value, and return what all ranks sent to this one, by rank."""
        if self._world_size == 1:
            return list(values)
        group, own = self._hosts(), values[self._rank]
        sent = [b"" if rank == self._rank else pickle.dumps(value, 5) for rank, value in enumerate(values)]
        lengths = self._gathered([len(one) for one in sent])
        incoming = [of_rank[self._rank] for of_rank in lengths]
        received = torch.empty(sum(incoming), dtype=torch.uint8)
        outgoing = torch.frombuffer(bytearray().join(sent), dtype=torch.uint8)
        dist.all_to_all_single(received, outgoing, incoming, lengths[self._rank], group=group)
        parts = enumerate(received.split(incoming))
        return [own if rank == self._rank else pickle.loads(part.numpy()) for rank, part in parts]

    def _hosts(self) -> dist.ProcessGroup | None:
        """Return the group of all ranks over gloo; None where the default one is, or where there is one rank."""
        if self._group is None and self._device.type != "cpu" and self._world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        return self._group


def _sendable(error: Exception) -> Exception:
    """Return the error, or where it cannot be sent to other ranks one that has its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return EngineError(f"{type(error).__name__}: {error}")
    return error
