"""Prompts that a function of the user's gives as they are needed: a data source with a state.

`get_samples(path, state, count, results) -> (rows, state)` is called for the next `count` prompts with the state that
it returned last, None at first, and with what became of the prompts of the round before. It is a pure function: what it
remembers is its state, a JSON value that is committed with the iteration, and what it draws by chance it draws from the
state. So a run that goes on, or an iteration that is done again, gets the same prompts.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import JsonValue

from cairn.configs.kinds import STATEFUL_SOURCE
from cairn.configs.schema.data import DataConfig
from cairn.storage.canonical import from_json
from cairn.tasks.data.errors import BadData, BadPrompt
from cairn.tasks.data.images import RowImages
from cairn.tasks.data.prompts import PromptData, PromptRow
from cairn.tasks.data.results import GroupResult
from cairn.tasks.data.stream import Draw, DrawnRow, drawn_so_far

_BARREN = 100
"""Calls in a row after which a source of which no prompt will do is given up."""


@dataclass(frozen=True)
class _Given:
    """Rows that were given just now."""

    path: str
    rows: Sequence[dict[str, Any]]
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class GivenPrompts:
    """What a function of the user's gives. Its source counts as that of any plug-in; `path` counts by its name."""

    def __init__(self, config: DataConfig, tokenizer: Any, tools: list[Any] | None = None) -> None:
        """`tools`: as in `PromptData`."""
        assert config.get_samples_path is not None
        self.path = config.path
        self.name = config.get_samples_path
        self._format = config
        self._images = RowImages(config, tokenizer.name_or_path) if config.multimodal_keys else None
        self._tokenizer = tokenizer
        self._tools = tools
        self._function = STATEFUL_SOURCE.load(config.get_samples_path)

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of the path that the function is given."""
        return hashlib.sha256(self.path.encode()).hexdigest()

    def draw(
        self,
        cursor: JsonValue,
        count: int,
        results: Sequence[GroupResult],
        *,
        max_prompt_len: int | None,
        without: Collection[int] = (),
    ) -> Draw[PromptRow]:
        """The next `count` prompts; what is too long, or gives no prompt, is passed over, and more are asked for.
        Raises BadData where the function fails, or gives something else than it should."""
        before: dict[str, Any] = cursor if isinstance(cursor, dict) else {}
        given, state = drawn_so_far(cursor), before.get("state")
        rows: list[DrawnRow[PromptRow]] = []
        passed_over, barren = 0, 0
        if not count and results:  # all that is generated was begun before: the source learns of the round all the same
            _, state = self._ask(state, 0, results)
        while len(rows) < count:
            found, state = self._ask(state, count - len(rows), results)
            taken = len(rows)
            data = PromptData(
                _Given(f"{self.name}, from its prompt {given + 1} on", found),
                self._format,
                self._tokenizer,
                self._images,
                self._tools,
            )
            for index in range(len(found)):
                try:
                    row = None if given + index in without else data.row(index)
                except BadPrompt:
                    row = None
                if row is not None and (max_prompt_len is None or len(row.prompt_ids) <= max_prompt_len):
                    number = given + index
                    rows.append(DrawnRow(number, 0, replace(row, index=number)))
            passed_over += len(found) - (len(rows) - taken)
            given, results = given + len(found), ()
            barren = 0 if len(rows) > taken else barren + 1
            if barren == _BARREN:
                raise BadData(
                    f"none of the last {_BARREN} rounds of prompts of {self.name} could be used: they are empty, are "
                    f"refused by the chat template, or have more than {max_prompt_len} tokens; correct it"
                )
        return Draw(rows, {"drawn": given, "state": state}, passed_over)

    def _ask(
        self, state: JsonValue, count: int, results: Sequence[GroupResult]
    ) -> tuple[list[dict[str, Any]], JsonValue]:
        try:
            own = json.loads(json.dumps(state))  # to do with as it likes: the state lies in a commit
            answer = self._function(self.path, own, count, tuple(results))
        # Whatever user code raises is the user's to see.
        except Exception as error:
            raise BadData(f"the data source {self.name!r} failed with {error!r}: correct it") from error
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[0], Sequence):
            raise BadData(f"the data source {self.name!r} returned {answer!r}: let it return (rows, state)")
        rows, after = answer
        if len(rows) != count or not all(isinstance(row, Mapping) for row in rows):
            raise BadData(
                f"the data source {self.name!r} returned {len(rows)} rows where {count} were asked for, or something "
                "else than mappings: let it return as many mappings as it is asked for"
            )
        lacking = [row for row in rows if self._format.input_key not in row]
        if lacking:
            raise BadData(
                f"the data source {self.name!r} gave a row without the field {self._format.input_key!r}, which "
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
