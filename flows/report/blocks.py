"""Columns packed for a browser: gzip of bytes that a typed array or a text decoder reads without conversion.

    u32      bytes of the header
    header   JSON: {"rows": n, "columns": [{"name", "kind", "at", "bytes", …}]}
    …        the columns' bytes, each beginning at a multiple of 8 that `at` counts from the end of the padded header

| kind | bytes | |
|---|---|---|
| `f32`, `f64`, `i32`, `u8` | one number a row | NaN: unknown |
| `i16` | one number a row, times `scale` | −32768: unknown |
| `text` | UTF-8, all rows | preceded by u32 offsets of the rows and of the end |
| `words` | i32, an index into `words` | −1: none |
| `json` | none | `value` |

Everything is little-endian, like browsers.
"""

import gzip
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cairn.flows.reading.episodes import EpisodeView
from cairn.flows.reading.pieces import MOST as MOST_OF_A_PIECE
from cairn.flows.reading.pieces import Piece, pieces
from cairn.flows.text import shortened as cut_text

_LEVEL = 6
_KINDS = {"f4": "f32", "f8": "f64", "i4": "i32", "u1": "u8"}
_UNKNOWN = -32768


class Block:
    """A block, built column by column."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._columns: list[dict[str, Any]] = []
        self._data: list[bytes] = []
        self._size = 0

    def numbers(self, name: str, values: np.ndarray) -> None:
        """Add a column of float32, float64, int32 or uint8."""
        kind = _KINDS[values.dtype.str[1:]]
        self._add(name, kind, np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<")).tobytes())

    def scaled(self, name: str, values: np.ndarray) -> None:
        """Add a column of floats, rounded to multiples of 1/32767 of the largest absolute value."""
        known = np.isfinite(values)
        largest = float(np.abs(values[known]).max()) if known.any() else 0.0
        scale = largest / 32767 or 1.0
        codes = np.where(known, np.rint(np.where(known, values, 0.0) / scale), _UNKNOWN).astype("<i2")
        self._add(name, "i16", codes.tobytes(), scale=scale)

    def text(self, name: str, values: pa.Array) -> None:
        """Add a column of texts; null becomes empty."""
        texts = pc.fill_null(values.cast(pa.large_string()), "")
        texts = pa.concat_arrays([texts])  # a slice's buffers are those of the whole
        _, offsets, data = texts.buffers()
        ends = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        letters = b"" if data is None else data.to_pybytes()[int(ends[0]) : int(ends[-1])]
        self._add(name, "text", (ends - ends[0]).astype("<u4").tobytes() + letters)

    def words(self, name: str, values: pa.Array) -> None:
        """Add a column of texts with few distinct values; null is stored as none."""
        coded = values.dictionary_encode()
        codes = pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False).astype("<i4")
        self._add(name, "words", codes.tobytes(), words=coded.dictionary.to_pylist())

    def value(self, name: str, value: Any) -> None:
        """Add one JSON value for the whole block."""
        self._add(name, "json", b"", value=value)

    def to_bytes(self) -> bytes:
        """Return the gzipped block; equal bytes for equal blocks."""
        # ASCII, because lone surrogates are valid in JSON but not in UTF-8.
        header = json.dumps({"rows": self.rows, "columns": self._columns}, separators=(",", ":")).encode("ascii")
        header += b" " * (-(len(header) + 4) % 8)
        return gzip.compress(struct.pack("<I", len(header)) + header + b"".join(self._data), _LEVEL, mtime=0)

    def _add(self, name: str, kind: str, data: bytes, **more: Any) -> None:
        self._columns.append({"name": name, "kind": kind, "at": self._size, "bytes": len(data), **more})
        padded = data + bytes(-len(data) % 8)
        self._data.append(padded)
        self._size += len(padded)


def text_blocks(name: str, values: pa.ChunkedArray | pa.Array, most: int) -> list[Block]:
    """Split a long column of texts into blocks of at most `most` bytes each, or of one row where that is longer. Each
    block has the value `first`, the number of its first row."""
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
    """Return the texts, all cut to the same length so that they have about `most` bytes together at most, and that
    length in characters; None as the length where nothing was cut."""
    sizes = pc.binary_length(pc.fill_null(values, "")).to_numpy(zero_copy_only=False)
    if int(sizes.sum()) <= most:
        return values, None
    cut = _longest_cut(sizes, most)
    return pc.utf8_slice_codeunits(values, 0, cut), cut


def joined(values: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Concatenate arrays; return an empty one for no arrays."""
    return np.concatenate([np.asarray(v, dtype) for v in values]) if values else np.zeros(0, dtype)


# Tokens of the selected samples for the page: ids, texts, and the values of each step.


MOST = 2_000_000
"""Number of tokens of all samples together at most. Longer samples lose their middle, all down to the same length."""
_HEAD = 0.75
"""Share of a shortened sample that comes before the gap."""
_WHOLE = {"id": np.int32, "version": np.int32, "age": np.int32, "mask": np.uint8}
_FLOATS = ("log_prob", "advantage", "return", "value", "log_ratio", "ref_log_ratio", "teacher_log_ratio")


def token_blocks(
    tokens: pa.Table, texts: Callable[[np.ndarray], list[str]] | None, most: int = MOST
) -> tuple[Block, Block]:
    """Return a block with a row for each sample, and one with a row for each token.

    Args:
        tokens: as `read_tokens` returns them.
        texts: returns a text for each id of a sample; None: ids only.
    """
    rows, begins, lengths = np.unique(tokens.column("row").to_numpy(), return_index=True, return_counts=True)
    longest = _longest_cut(lengths, most)
    heads = np.where(lengths <= longest, lengths, int(longest * _HEAD))
    tails = np.where(lengths <= longest, 0, longest - heads)
    places = [
        np.r_[begin : begin + head, begin + length - tail : begin + length]
        for begin, length, head, tail in zip(begins, lengths, heads, tails, strict=True)
    ]
    shown = np.concatenate(places) if places else np.zeros(0, np.int64)
    samples, values = Block(len(rows)), Block(len(shown))
    for name, column in {"row": rows, "kept": heads + tails, "head": heads, "length": lengths}.items():
        samples.numbers(name, column.astype(np.int32))
    if texts is not None:
        ids = tokens.column("id").to_numpy()
        whole = [text for begin, n in zip(begins, lengths, strict=True) for text in texts(ids[begin : begin + n])]
        values.words("text", pa.array(whole, pa.large_string()).take(pa.array(shown)))
    few = tokens.take(pa.array(shown))
    for name, dtype in _WHOLE.items():
        values.numbers(name, few.column(name).fill_null(-1 if dtype is np.int32 else 0).to_numpy().astype(dtype))
    for name in _FLOATS:
        column = few.column(name).to_numpy(zero_copy_only=False)
        if np.isfinite(column.astype(np.float64)).any():
            values.scaled(name, column.astype(np.float64))
    return samples, values


def _longest_cut(lengths: np.ndarray, most: int) -> int:
    """Return the longest length to which all can be cut so that they have at most `most` together."""
    low, high = 0, int(lengths.max(initial=0))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if int(np.minimum(lengths, middle).sum()) <= most else (low, middle - 1)
    return low


# Turns and calls of the selected samples for the page: a JSON text for each sample.


def turn_block(episodes: Mapping[int, EpisodeView]) -> Block:
    """Return a block with a row for each sample that is an episode. `episodes`: by the sample's row among all
    samples."""
    block = Block(len(episodes))
    block.numbers("row", np.array(list(episodes), np.int32))
    texts = [json.dumps(list(map(_shown, pieces(episode))), ensure_ascii=True) for episode in episodes.values()]
    block.text("pieces", pa.array(texts, pa.large_string()))
    return block


def _shown(piece: Piece) -> dict[str, str | None]:
    text = piece.text if piece.text is None or piece.arguments is not None else cut_text(piece.text, MOST_OF_A_PIECE)
    return {"name": piece.name, "facts": ", ".join(piece.facts), "given": piece.arguments, "text": text}
