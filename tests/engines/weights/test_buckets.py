import pickle

import torch

from cairn.engines.weights.buckets import ALIGNMENT, Bucket


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


def test_every_tensor_of_a_bucket_begins_aligned() -> None:
    _, (_, layout) = Bucket({str(i): torch.zeros(i, dtype=torch.uint8) for i in range(1, 130)}).__reduce__()
    assert all(start % ALIGNMENT == 0 for _, _, _, start in layout)
