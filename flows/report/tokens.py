"""The tokens of a few samples, as the page takes them: their ids, their texts, and what each step knew of them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.flows.report.blocks import Block

MOST = 2_000_000
"""Tokens of all samples together. Of longer samples the middle is left out, of all to the same length."""
_HEAD = 0.75
"""Of what is left of a sample stands before the gap."""
_WHOLE = {"id": np.int32, "version": np.int32, "age": np.int32, "mask": np.uint8}
_FLOATS = ("log_prob", "advantage", "return", "value", "log_ratio", "ref_log_ratio", "teacher_log_ratio")
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that one character may be made of, in any tokenizer that falls back to bytes."""


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


class Texts:
    """The text of each token of a response, so that all together are the response."""

    def __init__(self, tokenizer: Any) -> None:
        """A tokenizer of Transformers."""
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def __call__(self, ids: np.ndarray) -> list[str]:
        """A text a token; "" for one that only begins or goes on with a character that a later one ends."""
        listed = ids.tolist()
        for one in set(listed) - self._alone.keys():
            self._alone[one] = self._decode([one])
        texts = [self._alone[one] for one in listed]
        return texts if "".join(texts) == self._decode(listed) else self._in_company(listed)

    def are_of(self, ids: np.ndarray, response: str) -> bool:
        """Whether this tokenizer makes the response of the ids: another model may lie at the place by now."""
        return self._decode(ids.tolist(), skip_special_tokens=True) == response

    def _in_company(self, ids: Sequence[int]) -> list[str]:
        """As `__call__`, for tokens whose texts depend on those before them."""
        texts, begin, shown = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[begin:end])
            is_part = text.endswith(_REPLACEMENT) and end < len(ids) and end - begin < 2 * _LONGEST_CHARACTER
            texts.append("" if is_part else text[len(shown) :])
            if not is_part:
                # One token of the past is enough to decode the next as it is decoded in its place.
                begin, shown = end - 1, self._decode(ids[end - 1 : end])
        return texts

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
