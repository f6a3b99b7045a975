"""Endless stream of prompts that a run draws from: one pass through the data after the other.

A position in the stream is a cursor: epoch `cursor // n`, place `cursor % n` in that epoch's order. The seed fixes the
row at every position. So the cursor is all that a run has to store, and it is the group's id too.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from pydantic import JsonValue

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.kinds import STATEFUL_SOURCE
from cairn.configs.schema.data import DataConfig
from cairn.storage.store.canonical import from_json
from cairn.tasks.data.prompts import PromptData, PromptRow, Row, RowImages
from cairn.tasks.data.slime_source import as_function

# Results of a round's prompts, for a curriculum or a data source with a state.


@dataclass(frozen=True)
class GroupResult:
    """A judged group: its prompt and the policy's result."""

    group_id: int
    prompt_index: int
    """Index of the prompt in the data; for a source with a state, its number among the source's prompts, from 0."""
    label: str | None
    metadata: dict[str, Any]
    """Metadata of the prompt's row."""
    mean_reward: float | None
    """Mean over the group's samples; None where a sample failed."""
    std_reward: float | None
    kept: bool
    """Whether the filter kept the group. It may be trained on later, from the buffer."""
    reason: str | None
    """Reason why it was not kept."""
    pass_rate: float | None = None
    """Share of the group's answers that are right, from its mean reward and the rewards that its grader pays; None
    where a sample failed. Rewards of the user's own graders count as shares."""


AnyRow = TypeVar("AnyRow", bound=Row, covariant=True)


class Source(Protocol[AnyRow]):
    """Data that rows are drawn from."""

    @property
    def path(self) -> str: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> AnyRow: ...


@dataclass(frozen=True)
class Draw(Generic[AnyRow]):
    """Consecutive rows of the stream."""

    rows: list[AnyRow]
    cursor: JsonValue
    """Beginning of the next draw: a position in the stream, or the state of data that are not a plain stream."""
    passed_over: int
    """Number of skipped prompts: too long, rejected by the chat template, or in quarantine."""
    refusal: str | None = None
    """Reason why the last row without a prompt has none, and what to do."""


def drawn_so_far(cursor: JsonValue) -> int:
    """Return a number above the id of every group that was drawn before a cursor of any kind."""
    if isinstance(cursor, dict):
        cursor = cursor["drawn"]
    assert isinstance(cursor, int)
    return cursor


@functools.lru_cache(maxsize=32)
def order(seed: int | str, epoch: int, n: int) -> np.ndarray:
    """Return the rows of one epoch in their random order, the same on every machine and version: [n] int64, read-only.

    The rows are sorted by the raw output of the counter-based generator Philox. numpy guarantees that this stream never
    changes (NEP 19), but gives no such guarantee for `permutation`.
    """
    key = np.frombuffer(hashlib.blake2b(f"order/{seed}/{epoch}".encode(), digest_size=16).digest(), "<u8")
    permutation = np.argsort(np.random.Philox(key=key).random_raw(n), kind="stable")
    permutation.flags.writeable = False
    return permutation


def row_at(position: int, n: int, seed: int | str, shuffle: bool) -> int:
    """Return the row at a position of the stream over `n` rows."""
    epoch, place = divmod(position, n)
    return int(order(seed, epoch, n)[place]) if shuffle else place


def usable_row(data: Source[AnyRow], index: int, max_prompt_len: int | None) -> AnyRow | None:
    """Return the row at `index`; None without a usable prompt, or where it is longer than `max_prompt_len` tokens."""
    try:
        row = data.row(index)
    except BadPrompt:
        return None
    return row if max_prompt_len is None or len(row.prompt_ids) <= max_prompt_len else None


def draw(
    data: Source[AnyRow],
    cursor: int,
    count: int,
    *,
    seed: int | str,
    shuffle: bool,
    max_prompt_len: int | None,
    without: Collection[int] = (),
    prepare: Callable[[Iterable[int]], None] | None = None,
) -> Draw[AnyRow]:
    """Return the next `count` prompts after `cursor`. `prepare` is called with the rows at the positions after them.

    Skips prompts longer than `max_prompt_len` tokens, rows without a usable prompt, and those of `without`. A pure
    function of its arguments. A draw may span any number of epochs.

    Raises:
        BadData: no prompt of the data is usable.
    """
    n = len(data)
    rows: list[AnyRow] = []
    position, last_used, shortest, refusal = cursor, cursor - 1, None, None
    while len(rows) < count:
        index = row_at(position, n, seed, shuffle)
        try:
            row = None if index in without else data.row(index)
        except BadPrompt as error:
            row, refusal = None, error
        if row is not None:
            length = len(row.prompt_ids)
            if max_prompt_len is None or length <= max_prompt_len:
                rows.append(replace(row, group_id=position, epoch=position // n))
                last_used = position
            else:
                shortest = length if shortest is None else min(shortest, length)
        position += 1
        # This many consecutive positions contain at least one whole epoch, wherever they begin.
        if position - last_used >= 2 * n:
            if shortest is None and refusal is None:
                raise BadData(f"every prompt of {data.path} is in quarantine: release some of them")
            if shortest is None:
                raise BadData(f"no row of {data.path} gives a prompt; the last one: {refusal}")
            raise BadData(
                f"{data.path}: every prompt is longer than {max_prompt_len} tokens (the shortest has {shortest}): "
                "raise rollout_max_prompt_len, lower rollout_max_response_len, or use a model with a longer context"
            )
    if prepare is not None:
        prepare(row_at(later, n, seed, shuffle) for later in range(position, position + min(count, n)))
    return Draw(rows, position, position - cursor - len(rows), None if refusal is None else str(refusal))


# Prompts that a function of the user's provides on demand: a data source with a state.


_BARREN = 100
"""Consecutive calls without a usable prompt after which a source is given up."""


@dataclass(frozen=True)
class _ReturnedRows:
    """Rows that the function has just returned."""

    path: str
    rows: Sequence[dict[str, Any]]
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class StatefulPrompts:
    """Prompts from a function of the user's, a data source with a state.

    `get_samples(path, state, count, results) -> (rows, state)` is called for the next `count` prompts. It receives the
    state that it returned last (None at first) and the results of the prompts of the round before. It must be a pure
    function: its memory is its state, a JSON value that is committed with the iteration, and its random draws must
    derive from the state. So a run that is resumed, or an iteration that is repeated, gets the same prompts.

    The function's source is digested like that of any plug-in; of `path` only the string is.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        tools: list[Any] | None = None,
        args: Callable[[Any], Mapping[str, Any]] = lambda source: {},
    ) -> None:
        """Create the source. Raises BadPlugin.

        Args:
            tools: default tools for the chat template.
            args: returns the values of `args` for a class that was written for slime.
        """
        assert config.get_samples_path is not None
        self.path = config.path
        self.name = config.get_samples_path
        self._format = config
        self._images = RowImages(config, tokenizer.name_or_path) if config.multimodal_keys else None
        self._tokenizer = tokenizer
        self._tools = tools
        self._function = STATEFUL_SOURCE.load(config.get_samples_path)
        self._reads_file = isclass(self._function) and Path(self.path).is_file()
        if isclass(self._function):
            self._function = as_function(self._function, self.name, args(self._function))

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the path that the function receives, and for a class of the file that it names."""
        content = Path(self.path).read_bytes() if self._reads_file else b""
        return hashlib.sha256(self.path.encode() + content).hexdigest()

    def draw(
        self,
        cursor: JsonValue,
        count: int,
        results: Sequence[GroupResult],
        *,
        max_prompt_len: int | None,
        without: Collection[int] = (),
    ) -> Draw[PromptRow]:
        """Return the next `count` prompts. Prompts that are too long or unusable are skipped, and more are requested.
        Raises BadData where the function fails, or returns something else than it should."""
        drawn, state = drawn_so_far(cursor), cursor.get("state") if isinstance(cursor, dict) else None
        rows: list[PromptRow] = []
        passed_over, barren = 0, 0
        if not count and results:  # a round of continued groups alone: the source gets its results too
            _, state = self._call(state, 0, results)
        while len(rows) < count:
            returned, state = self._call(state, count - len(rows), results)
            before = len(rows)
            data = PromptData(
                _ReturnedRows(f"{self.name}, from its prompt {drawn + 1} on", returned),
                self._format,
                self._tokenizer,
                self._images,
                self._tools,
            )
            for index in range(len(returned)):
                number = drawn + index
                row = None if number in without else usable_row(data, index, max_prompt_len)
                if row is not None:
                    rows.append(replace(row, index=number, group_id=number))
            passed_over += len(returned) - (len(rows) - before)
            drawn, results = drawn + len(returned), ()
            barren = 0 if len(rows) > before else barren + 1
            if barren == _BARREN:
                raise BadData(
                    f"none of the last {_BARREN} rounds of prompts of {self.name} could be used: they are empty, are "
                    f"refused by the chat template, or have more than {max_prompt_len} tokens; correct it"
                )
        return Draw(rows, {"drawn": drawn, "state": state}, passed_over)

    def _call(
        self, state: JsonValue, count: int, results: Sequence[GroupResult]
    ) -> tuple[list[dict[str, Any]], JsonValue]:
        try:
            own = json.loads(json.dumps(state))  # a copy that the function may change: the state lies in a commit
            answer = self._function(self.path, own, count, tuple(results))
        # User code may raise any exception. Show it to the user.
        except Exception as error:
            raise BadData(f"the data source {self.name!r} failed with {error!r}: correct it") from error
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Sequence):
            raise BadData(f"the data source {self.name!r} returned {answer!r}: let it return (rows, state)")
        rows, after = answer
        if len(rows) != count or not all(isinstance(row, Mapping) for row in rows):
            raise BadData(
                f"the data source {self.name!r} returned {len(rows)} rows where {count} were requested, or something "
                "else than mappings: let it return as many mappings as requested"
            )
        lacking = [row for row in rows if self._format.input_key not in row]
        if lacking:
            raise BadData(
                f"the data source {self.name!r} returned a row without the field {self._format.input_key!r}, which "
                f"data.input_key names; it has {', '.join(map(str, lacking[0])) or 'none'}"
            )
        label = {} if self._format.label_key is None else {self._format.label_key: None}
        try:
            return from_json(json.dumps([{**label, **row} for row in rows])), from_json(json.dumps(after))
        except (TypeError, ValueError, RecursionError) as error:
            raise BadData(
                f"the data source {self.name!r} returned rows or a state that are not JSON ({error}): let it return "
                "JSON values"
            ) from error
