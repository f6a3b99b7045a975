"""A handle on GPU memory as SGLang's servers read it: on the very same GPU, whatever its index is in their process."""

import io
import pickle
from multiprocessing import get_context
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from cairn.engines.weights.buckets import DEVICE_ARGUMENT


def _rebuild(*arguments: Any) -> torch.Tensor:
    """As SGLang's servers do: PyTorch itself knows no GPU by its identity."""
    identities = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    index = identities.index(arguments[DEVICE_ARGUMENT])
    return rebuild_cuda_tensor(*arguments[:DEVICE_ARGUMENT], index, *arguments[DEVICE_ARGUMENT + 1 :])


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _rebuild if name == rebuild_cuda_tensor.__name__ else super().find_class(module, name)


def _put_sums(handle: bytes, sums: Any) -> None:
    sums.put({name: tensor.sum().item() for name, tensor in _Reader(io.BytesIO(handle)).load()})


def sums_in_another_process(handle: bytes) -> dict[str, float]:
    """The sum of every tensor of a handle (`cairn.engines.weights.buckets.share`), as another process reads it."""
    context = get_context("spawn")
    sums = context.Queue()
    reader = context.Process(target=_put_sums, args=(handle, sums))
    reader.start()
    found: dict[str, float] = sums.get(timeout=300)
    reader.join(60)
    return found
