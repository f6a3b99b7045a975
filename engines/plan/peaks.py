"""Peak floating-point operations of GPUs, by device name: dense, without sparsity, from their makers' data sheets."""

PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("L40S", 362.05),
    ("L40", 181.05),
    ("L20", 119.5),
    ("L4", 121.0),
    ("A40", 149.7),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("RTX 5090", 209.5),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI355X", 2516.6),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)
"""TFLOP/s in bfloat16 with float32 accumulation. The first entry whose name is part of the device's name applies."""


def peak_tflops(device: str, dtype: str) -> float | None:
    """Return the peak TFLOP/s of a device in a number format.

    Returns None where it is not known: for CPUs, and for formats other than bfloat16.
    """
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in PEAK_TFLOPS if name in device), None)
