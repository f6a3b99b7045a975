"""The tokens of a few samples: their ids, their texts, and what each step knew of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from cairn.flows.report.blocks import Block, joined
from cairn.flows.report.data import History, Progress, list_values, read_file
from cairn.storage.commits import Step
from cairn.storage.errors import Retired
from cairn.storage.ledger import Ledger

_TOKENS = 2_000_000
"""Of all samples together. Of longer ones the middle is left out, of all to the same length."""
_HEAD = 0.75
_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that one character may be made of, in any tokenizer that falls back to bytes."""
_COLUMNS = {
    Step.ROLLOUT: {"response_ids": "id", "log_probs": "log_prob", "loss_mask": "mask", "weight_versions": "version"},
    Step.SCORE: {
        "log_probs": "old_log_prob",
        "ref_log_probs": "ref_log_prob",
        "teacher_log_probs": "teacher_log_prob",
        "values": "value",
    },
    Step.ADVANTAGE: {"advantages": "advantage", "returns": "return", "ages": "age"},
}
"""Columns of the steps' tables → what the report calls them."""
_WHOLE = {"id": np.int32, "version": np.int32, "age": np.int32, "mask": np.uint8}


@dataclass
class Tokens:
    """One sample's, in their order. [T] arrays, all of one length."""

    row: int
    values: dict[str, np.ndarray] = field(default_factory=dict)
    segments: list[dict[str, Any]] | None = None
    length: int = 0
    """Before the middle was left out."""
    head: int = 0
    """Tokens before the gap; all where there is none."""


def read_tokens(
    ledger: Ledger, history: History, rows: pa.Table, chosen: Sequence[int], tell: Progress
) -> list[Tokens]:
    """The tokens of some rows. Raises Damaged."""
    few = rows.select(["iteration", "group_id", "sample_index"]).take(pa.array(chosen, pa.int64())).to_pylist()
    found = {(row["group_id"], row["sample_index"]): Tokens(number) for number, row in zip(chosen, few, strict=True)}
    home = {(row["group_id"], row["sample_index"]): row["iteration"] for row in few}
    for done, (of_samples, _, of_tokens) in enumerate(history.sources, 1):
        tell("reading tokens", done, len(history.sources))
        for commit in [*of_samples, *of_tokens]:
            names = _COLUMNS.get(commit.step)
            is_rollout = commit.step is Step.ROLLOUT
            wanted = [key for key, iteration in home.items() if iteration == commit.iteration or not is_rollout]
            if names is None or not wanted:
                continue
            try:
                table = read_file(ledger, commit)
            except Retired:
                continue
            _take(table, names, {key: found[key] for key in wanted}, is_rollout)
    return sorted((tokens for tokens in found.values() if "id" in tokens.values), key=lambda tokens: tokens.row)


def _take(table: pa.Table, names: Mapping[str, str], found: Mapping[tuple[int, int], Tokens], is_rollout: bool) -> None:
    keys = zip(table.column("group_id").to_pylist(), table.column("sample_index").to_pylist(), strict=True)
    places = [(place, found[key]) for place, key in enumerate(keys) if key in found]
    if not places:
        return
    few = table.take(pa.array([place for place, _ in places]))
    for name, ours in names.items():
        if name in few.column_names:
            values, begin = list_values(few.column(name))
            for place, (_, tokens) in enumerate(places):
                if begin[place + 1] > begin[place] or is_rollout:
                    tokens.values[ours] = values[begin[place] : begin[place + 1]]
    if is_rollout:
        for (_, tokens), segments in zip(places, few.column("segments").to_pylist(), strict=True):
            tokens.segments = segments
            tokens.length = tokens.head = len(tokens.values["id"])


def token_blocks(found: Sequence[Tokens], texts: Callable[[np.ndarray], list[str]] | None) -> tuple[Block, Block]:
    """A row a sample, and a row a token.

    Args:
        texts: gives the ids of a sample a text each; None: ids must do.
    """
    pieces = [] if texts is None else [texts(tokens.values["id"]) for tokens in found]
    longest = _cut([tokens.length for tokens in found])
    kept = []
    for tokens in found:
        head = tokens.length if tokens.length <= longest else int(longest * _HEAD)
        tokens.head = head
        kept.append(np.r_[:head, max(head, tokens.length - (longest - head)) : tokens.length])
    total = sum(map(len, kept))
    samples, values = Block(len(found)), Block(total)
    samples.numbers("row", np.array([tokens.row for tokens in found], np.int32))
    samples.numbers("kept", np.array(list(map(len, kept)), np.int32))
    samples.numbers("head", np.array([tokens.head for tokens in found], np.int32))
    samples.numbers("length", np.array([tokens.length for tokens in found], np.int32))
    samples.value("segments", [tokens.segments for tokens in found])
    if texts is not None:
        shown = [
            piece[place] for piece, places in zip(pieces, kept, strict=True) for place in places if piece is not None
        ]
        values.words("text", pa.array(shown, pa.large_string()))
    for name, dtype in _WHOLE.items():
        if any(name in tokens.values for tokens in found):
            nothing = -1 if dtype is np.int32 else 1
            values.numbers(name, joined([_of(t, name, nothing)[k] for t, k in zip(found, kept, strict=True)], dtype))
    for name, of in _FLOATS.items():
        column = joined([of(t)[k] for t, k in zip(found, kept, strict=True)], np.float64)
        if np.isfinite(column).any():
            values.scaled(name, column)
    return samples, values


def _of(tokens: Tokens, name: str, nothing: float = np.nan) -> np.ndarray:
    found = tokens.values.get(name)
    return found if found is not None and len(found) == tokens.length else np.full(tokens.length, nothing)


def _difference(name: str, other: str) -> Callable[[Tokens], np.ndarray]:
    return lambda tokens: np.subtract(_of(tokens, name), _of(tokens, other), dtype=np.float64)


def _plain(name: str) -> Callable[[Tokens], np.ndarray]:
    return lambda tokens: _of(tokens, name)


_FLOATS: dict[str, Callable[[Tokens], np.ndarray]] = {
    **{name: _plain(name) for name in ("log_prob", "advantage", "return", "value")},
    "log_ratio": _difference("old_log_prob", "log_prob"),  # trainer, before the update, over rollout engine
    "ref_log_ratio": _difference("old_log_prob", "ref_log_prob"),
    "teacher_log_ratio": _difference("old_log_prob", "teacher_log_prob"),
}


def _cut(lengths: Sequence[int]) -> int:
    """The longest length at which all samples together have at most `_TOKENS` tokens."""
    low, high = 0, max(lengths, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sum(min(n, middle) for n in lengths) <= _TOKENS else (low, middle - 1)
    return low


class Texts:
    """The text of each token of a response, so that all together are the response."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def __call__(self, ids: np.ndarray) -> list[str]:
        """A text a token; "" for one that only begins or goes on with a character that a later one ends."""
        listed = ids.tolist()
        for one in set(listed) - self._alone.keys():
            self._alone[one] = self._decode([one])
        texts = [self._alone[one] for one in listed]
        return texts if "".join(texts) == self._decode(listed) else self._in_company(listed)

    def _in_company(self, ids: list[int]) -> list[str]:
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

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def are_of(self, ids: np.ndarray, response: str) -> bool:
        """Whether this tokenizer makes the response of the ids: another model may lie at the place by now."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) == response
