"""Freeing and restoring of memory below tensors, on a host without a device."""

import torch

from cairn.engines.training.megatron.state import Memory


def test_views_into_a_buffer_hold_the_same_bits_when_its_memory_is_back() -> None:
    memory, buffer, other = Memory(torch.device("cpu")), torch.randn(64), torch.arange(5, dtype=torch.int32)
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


def test_a_tensor_that_was_never_freed_is_its_own_content() -> None:
    tensor = torch.randn(3)
    assert Memory(torch.device("cpu")).content(tensor) is tensor
