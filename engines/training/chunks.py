"""Number of logits that are computed with at a time, besides those that exist whole."""

CHUNK_ON_CPU, CHUNK_ON_GPU = 1 << 20, 1 << 24
"""Logits of a chunk: 4 MiB in float32 fit a CPU's cache, 64 MiB occupy a GPU."""


def chunk_logits(*, on_gpu: bool) -> int:
    """Return the number of logits of a chunk; a chunk has at least one row."""
    return CHUNK_ON_GPU if on_gpu else CHUNK_ON_CPU
