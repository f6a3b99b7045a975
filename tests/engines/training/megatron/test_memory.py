"""Freeing and restoring of memory below tensors, on a host without a device."""

from typing import TYPE_CHECKING

import pytest
import torch

from cairn.engines.training.megatron.backend import backend_for

if TYPE_CHECKING:
    from cairn.engines.training.megatron.state import Memory


@pytest.fixture
def memory() -> "Memory":
    backend_for(torch.device("cpu"))
    from cairn.engines.training.megatron.state import Memory  # not before megatron.core can be imported

    return Memory(torch.device("cpu"))


def test_views_into_a_buffer_hold_the_same_bits_when_its_memory_is_back(memory: "Memory") -> None:
    buffer, other = torch.randn(64), torch.arange(5, dtype=torch.int32)
    gradients = torch.ones(64)
    views = [buffer[:24].view(4, 6), buffer[24:64:2], gradients[8:16]]
    before = [view.clone() for view in views]
    memory.free([*views[:2], buffer, other], [gradients])
    assert [tensor.untyped_storage().nbytes() for tensor in (buffer, other, gradients)] == [0, 0, 0]
    assert all(memory.content(view).equal(found) for view, found in zip(views[:2], before[:2], strict=True))
    memory.restore()
    assert [view.equal(found) for view, found in zip(views, before, strict=True)] == [True, True, False]
    assert other.tolist() == [0, 1, 2, 3, 4]
    assert not gradients.any()
    buffer[0] = 7.0
    assert views[0][0, 0] == 7.0


def test_a_tensor_that_was_never_freed_is_its_own_content(memory: "Memory") -> None:
    tensor = torch.randn(3)
    assert memory.content(tensor) is tensor
