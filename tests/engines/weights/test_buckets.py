import pickle

import torch

from cairn.engines.weights.buckets import Bucket


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_come_out_of_a_bucket_bit_for_bit() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "matrix": torch.randn(7, 5, generator=draw),
        "transposed": torch.randn(3, 4, generator=draw).T,
        "bfloat16": torch.randn(9, generator=draw).bfloat16(),
        "float16": torch.tensor([float("nan"), -0.0, 65504.0], dtype=torch.float16),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "counts": torch.arange(5),
    }
    result = pickle.loads(pickle.dumps(Bucket(tensors)))
    assert list(result) == list(tensors)
    for name, tensor in tensors.items():
        assert (result[name].dtype, result[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(result[name]) == bits(tensor)


def test_every_tensor_in_one_piece_begins_at_a_multiple_of_its_element_size() -> None:
    formats = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)
    tensors = {f"{dtype}{size}": torch.zeros(size, dtype=dtype) for size in (1, 3, 0, 7) for dtype in formats}
    packed = Bucket(tensors).on(torch.device("cpu"))
    assert packed.storage is not None
    assert packed.storage.numel() == sum(tensor.nbytes for tensor in tensors.values()), "there are gaps"
    start = packed.storage.data_ptr()
    assert all((tensor.data_ptr() - start) % tensor.element_size() == 0 for tensor in packed.values() if tensor.numel())
    assert packed.on(torch.device("cpu")) is packed
