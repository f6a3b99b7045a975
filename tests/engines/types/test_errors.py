"""Which errors make a process useless, and which only end a call."""

import pytest
import torch

from cairn.engines.types.errors import is_device_failure


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (RuntimeError("shape '[2, 3]' is invalid for input of size 5"), False),
        (ValueError("CUDA error"), False),
    ],
)
def test_errors_of_a_gpu_are_told_from_all_others(error: Exception, fails: bool) -> None:
    assert is_device_failure(error) is fails
