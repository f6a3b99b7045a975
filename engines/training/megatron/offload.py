"""Memory of a training state that is given away for a while, and comes back bit for bit."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Away:
    """Memory that was given away."""

    storage: torch.UntypedStorage
    size: int
    host: torch.Tensor | None
    """[size] bytes of the host that hold what was in it; None where that is not kept."""


class Memory:
    """Gives the memory below tensors away and takes it back.

    The tensors themselves stay what they are: Megatron's parameters, master weights and gradients are views into large
    buffers, known to buckets, shards and hooks, and all of them are valid again once the memory is back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._away: dict[int, _Away] = {}

    def give(self, kept: Iterable[torch.Tensor], dropped: Iterable[torch.Tensor]) -> None:
        """Give away the memory of all tensors on the device.

        Args:
            kept: what they hold is copied to the host, pinned where a GPU will fetch it.
            dropped: what they hold is not needed again.
        """
        for tensor in kept:
            self._give(tensor, keep=True)
        for tensor in dropped:
            self._give(tensor, keep=False)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def take(self) -> None:
        """Take it back; what was dropped is zero."""
        for away in self._away.values():
            away.storage.resize_(away.size)
            if away.host is None:
                torch.empty(0, dtype=torch.uint8, device=self._device).set_(away.storage).zero_()
            else:
                away.storage.copy_(away.host.untyped_storage())
        self._away.clear()

    def held(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a tensor that is kept holds: itself, or its copy on the host."""
        away = self._away.get(tensor.untyped_storage()._cdata)
        if away is None or away.host is None:
            return tensor
        on_host = torch.empty(0, dtype=tensor.dtype)
        return on_host.set_(away.host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def _give(self, tensor: torch.Tensor, *, keep: bool) -> None:
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if tensor.device.type != self._device.type or not size:
            return
        host = None
        if keep:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=tensor.is_cuda)
            host.untyped_storage().copy_(storage)
        self._away[storage._cdata] = _Away(storage, size, host)
        storage.resize_(0)
