"""Columns, packed for a browser: bytes that a typed array or a text decoder takes as they are, in gzip.

    u32      bytes of the header
    header   JSON: {"rows": n, "columns": [{"name", "kind", "at", "bytes", …}]}
    …        the columns' bytes, each beginning at a multiple of 8 that `at` counts from the end of the padded header

| kind | bytes | |
|---|---|---|
| `f32`, `f64`, `i32`, `u8` | one number a row | NaN: not known |
| `i16` | one number a row, times `scale` | −32768: not known |
| `text` | UTF-8, all rows | u32 offsets of the rows, and of the end, stand before it |
| `words` | i32, an index into `words` | −1: none |
| `json` | none | `value` |

Everything is little-endian, as browsers are.
"""

import gzip
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_LEVEL = 6
_KINDS = {"f4": "f32", "f8": "f64", "i4": "i32", "u1": "u8"}
_UNKNOWN = -32768


class Block:
    """One block, column by column."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._columns: list[dict[str, Any]] = []
        self._data: list[bytes] = []
        self._size = 0

    def numbers(self, name: str, values: np.ndarray) -> None:
        """A column of float32, float64, int32 or uint8."""
        kind = _KINDS[values.dtype.str[1:]]
        self._add(name, kind, np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes())

    def scaled(self, name: str, values: np.ndarray) -> None:
        """A column of floats to 1/32767 of the largest."""
        known = np.isfinite(values)
        largest = float(np.abs(values[known]).max()) if known.any() else 0.0
        scale = largest / 32767 or 1.0
        codes = np.where(known, np.rint(np.where(known, values, 0.0) / scale), _UNKNOWN).astype("<i2")
        self._add(name, "i16", codes.tobytes(), scale=scale)

    def text(self, name: str, values: pa.Array) -> None:
        """A column of texts; null is as empty."""
        texts = pc.fill_null(values.cast(pa.large_string()), "")
        texts = pa.concat_arrays([texts])  # a slice's buffers are those of the whole
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        letters = b"" if data is None else data.to_pybytes()[int(ends[0]) : int(ends[-1])]
        self._add(name, "text", (ends - ends[0]).astype("<u4").tobytes() + letters)

    def words(self, name: str, values: pa.Array) -> None:
        """A column of texts of which there are few; null is none."""
        coded = values.dictionary_encode()
        codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False).astype("<i4")
        self._add(name, "words", codes.tobytes(), words=coded.dictionary.to_pylist())

    def value(self, name: str, value: Any) -> None:
        """One JSON value for the whole block."""
        self._add(name, "json", b"", value=value)

    def to_bytes(self) -> bytes:
        """The block in gzip; equal for equal blocks."""
        # ASCII: what JSON can spell and UTF-8 cannot, lone surrogates, comes through too.
        header = json.dumps({"rows": self.rows, "columns": self._columns}, separators=(",", ":")).encode("ascii")
        header += b" " * (-(len(header) + 4) % 8)
        return gzip.compress(struct.pack("<I", len(header)) + header + b"".join(self._data), _LEVEL, mtime=0)

    def _add(self, name: str, kind: str, data: bytes, **more: Any) -> None:
        self._columns.append({"name": name, "kind": kind, "at": self._size, "bytes": len(data), **more})
        padded = data + bytes(-len(data) % 8)
        self._data.append(padded)
        self._size += len(padded)


def text_blocks(name: str, values: pa.ChunkedArray | pa.Array, most: int) -> list[Block]:
    """A long column of texts in blocks of at most `most` bytes each, or of one row where that is longer. Each holds
    `first`, the number of its first row."""
    texts = pc.fill_null(values.cast(pa.large_string()), "")
    ends = np.cumsum(pc.binary_length(texts).to_numpy(zero_copy_only=False)) if len(texts) else np.zeros(0, np.int64)
    blocks, first, passed = [], 0, 0
    while first < len(texts):
        after = max(first + 1, int(np.searchsorted(ends, passed + most, "right")))
        block = Block(after - first)
        block.value("first", first)
        part = texts.slice(first, after - first)
        block.text(name, part.combine_chunks() if isinstance(part, pa.ChunkedArray) else part)
        blocks.append(block)
        first, passed = after, int(ends[after - 1])
    return blocks


def shortened(values: pa.ChunkedArray | pa.Array, most: int) -> tuple[Any, int | None]:
    """The texts, each cut to the length at which all together have at most about `most` bytes, and that length in
    characters; None where nothing had to be cut."""
    sizes = pc.binary_length(pc.fill_null(values, "")).to_numpy(zero_copy_only=False)
    if int(sizes.sum()) <= most:
        return values, None
    low, high = 0, int(sizes.max())
    while low < high:  # the longest cut that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(sizes, middle).sum()) <= most else (low, middle - 1)
    return pc.utf8_slice_codeunits(values, 0, low), low


def joined(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Arrays one after the other; none of them: an empty one."""
    return np.concatenate([np.asarray(v, dtype) for v in values]) if values else np.zeros(0, dtype)
