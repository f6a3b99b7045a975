"""The tokens of a few samples, as the page takes them: their ids, their texts, and what each step knew of them."""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from cairn.flows.report.blocks import Block

MOST = 2_000_000
"""Tokens of all samples together. Of longer samples the middle is left out, of all to the same length."""
_HEAD = 0.75
"""Of what is left of a sample stands before the gap."""
_WHOLE = {"id": np.int32, "version": np.int32, "age": np.int32, "mask": np.uint8}
_FLOATS = ("log_prob", "advantage", "return", "value", "log_ratio", "ref_log_ratio", "teacher_log_ratio")


def token_blocks(
    tokens: pa.Table, texts: Callable[[np.ndarray], list[str]] | None, most: int = MOST
) -> tuple[Block, Block]:
    """A row a sample, and a row a token.

    Args:
        tokens: as `read_tokens` gives them.
        texts: gives the ids of a sample a text each; None: ids must do.
    """
    rows, begins, lengths = np.unique(tokens.column("row").to_numpy(), return_index=True, return_counts=True)
    longest = _cut(lengths, most)
    heads = np.where(lengths <= longest, lengths, int(longest * _HEAD))
    tails = np.where(lengths <= longest, 0, longest - heads)
    places = [
        np.r_[begin : begin + head, begin + length - tail : begin + length]
        for begin, length, head, tail in zip(begins, lengths, heads, tails, strict=True)
    ]
    kept = np.concatenate(places) if places else np.zeros(0, np.int64)
    samples, values = Block(len(rows)), Block(len(kept))
    for name, column in {"row": rows, "kept": heads + tails, "head": heads, "length": lengths}.items():
        samples.numbers(name, column.astype(np.int32))
    if texts is not None:
        ids = tokens.column("id").to_numpy()
        whole = [text for begin, n in zip(begins, lengths, strict=True) for text in texts(ids[begin : begin + n])]
        values.words("text", pa.array(whole, pa.large_string()).take(pa.array(kept)))
    few = tokens.take(pa.array(kept))
    for name, dtype in _WHOLE.items():
        values.numbers(name, few.column(name).fill_null(-1 if dtype is np.int32 else 0).to_numpy().astype(dtype))
    for name in _FLOATS:
        column = few.column(name).to_numpy(zero_copy_only=False)
        if np.isfinite(column.astype(np.float64)).any():
            values.scaled(name, column.astype(np.float64))
    return samples, values


def _cut(lengths: np.ndarray, most: int) -> int:
    """The longest length at which all samples together have at most so many tokens."""
    low, high = 0, int(lengths.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(lengths, middle).sum()) <= most else (low, middle - 1)
    return low
