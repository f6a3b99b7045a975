"""Rows that hold responses, as samples to train on: prompts with the response to them, or whole chats.

| `response_key` | `apply_chat_template` | a row is |
|---|---|---|
| null | true | a chat in `input_key`: the assistant's turns are learned, but for a `step_loss_mask` of 0 |
| a column | true | what that holds, said by the assistant after the prompt; turns in that are not learned |
| a column | false | its text after the prompt's, both as they stand, and then an end token |

Of preferences a row holds two responses to one prompt, each as in the last two lines: `chosen_key`, `rejected_key`.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from cairn.configs.schema.data import DataConfig
from cairn.tasks.data.chats import STEP_LOSS_MASK, Chats, Demonstrated, Messages
from cairn.tasks.data.columns import metadata_of, prompt_of, tools_of
from cairn.tasks.data.errors import BadData, BadPrompt
from cairn.tasks.data.prompts import OverRows, Rows, require_template, require_text
from cairn.tasks.data.rows import open_rows
from cairn.tasks.data.turn_ends import TurnEnds


@dataclass(frozen=True)
class DemonstrationRow:
    """One row, ready to be trained on."""

    index: int
    """Position in the data set, from 0; a sliced file is counted from the slice's start."""
    samples: tuple[Demonstrated, ...]
    """What is learned together."""
    truncated: bool
    """Whether it was longer than allowed, and its end cut off."""
    metadata: dict[str, Any] | None

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Of the first sample."""
        return self.samples[0].prompt_ids


class DemonstrationData(OverRows):
    """The demonstrations of one data set."""

    def __init__(
        self,
        rows: Rows,
        format: DataConfig,
        tokenizer: Any,
        max_length: int,
        *,
        pairs: bool,
        model_ends: Collection[int],
    ) -> None:
        """`max_length`: of a prompt and a response to it, in tokens. Raises BadData where nothing says how a response
        ends."""
        super().__init__(rows)
        self._tokenizer = tokenizer
        self._pairs = pairs
        self._format = format
        self._max_length = max_length
        self._chats: Chats | None = None
        self._end = TurnEnds(tokenizer, model_ends).default
        if format.apply_chat_template:
            self._chats = Chats(tokenizer, format.apply_chat_template_kwargs, model_ends)
        elif self._end is None:
            raise BadData(
                "neither the model's config nor its tokenizer names an end token, so no response would teach it to "
                "stop: add eos_token_id to its generation_config.json"
            )

    @classmethod
    def open(
        cls,
        format: DataConfig,
        path: str,
        tokenizer: Any,
        max_length: int,
        *,
        pairs: bool = False,
        model_ends: Collection[int] = (),
    ) -> "DemonstrationData":
        """Open what the data source gives for `path`, and check every row: see `open_rows`.

        Args:
            pairs: whether a row holds two responses, of which the first is preferred.
            model_ends: the tokens at which engines stop (`cairn.engines.models.end_tokens`).

        Raises:
            BadData: the data, or what they are to be rendered with, cannot be used.
        """
        require_template(format, tokenizer)
        if not pairs and format.response_key is None and not format.apply_chat_template:
            raise BadData(
                "data.response_key is null and data.apply_chat_template is false: name the column of the responses, "
                f"or let {format.input_key!r} hold chats and set apply_chat_template to true"
            )
        options = ["chosen_key", "rejected_key"] if pairs else ["input_key", "response_key"]
        required = {key: option for option in options if (key := getattr(format, option)) is not None}
        optional = {key for key in (format.metadata_key, format.tool_key, format.input_key) if key is not None}
        rows = open_rows(
            format.data_source_path,
            path,
            required,
            optional - required.keys(),
            lambda row, where: _fields(row, format, pairs, where),
        )
        return cls(rows, format, tokenizer, max_length, pairs=pairs, model_ends=model_ends)

    def row(self, index: int) -> DemonstrationRow:
        """Read, render and tokenize the row at `index`.

        Raises:
            BadPrompt: the chat template refuses it, nothing of it is to be learned, or it is too long and passed over.
            BadData: it is too long, and that is refused.
        """
        format, where = self._format, f"{self.path}, row {index + 1}"
        row = self._rows.read(index)
        chats, metadata, tools = _fields(row, format, self._pairs, where)
        samples = tuple(self._demonstrated(prompt, response, tools, where) for prompt, response in chats)
        longest = max(map(len, samples))
        if longest > self._max_length:
            words = f"{where} has {longest} tokens, and at most {self._max_length} are allowed"
            match format.overlong:
                case "refuse":
                    raise BadData(f"{words}: raise data.max_length, or set data.overlong to pass_over or truncate")
                case "pass_over":
                    raise BadPrompt(f"{words}: raise data.max_length, or set data.overlong to truncate")
                case "truncate":
                    samples = tuple(sample.cut(self._max_length, where) for sample in samples)
        return DemonstrationRow(index, samples, longest > self._max_length, metadata)

    def _demonstrated(
        self, prompt: str | Messages, response: str | Messages | None, tools: list[Any] | None, where: str
    ) -> Demonstrated:
        if self._chats is None:
            return self._plain(str(prompt), str(response), where)
        before: Messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        said: Messages = [{"role": "assistant", "content": response}] if isinstance(response, str) else response or []
        first = len(before) if said else 0
        messages = [*before, *said]
        turns = [
            index
            for index, message in enumerate(messages)
            if index >= first and message["role"] == "assistant" and message.get(STEP_LOSS_MASK, 1) != 0
        ]
        require_text(json.dumps(messages, ensure_ascii=False), where)
        return self._chats.demonstrated(messages, turns[-1:] if self._format.last_turn_only else turns, tools, where)

    def _plain(self, prompt: str, response: str, where: str) -> Demonstrated:
        require_text(prompt + response, where)
        before, after = (
            self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in (prompt, response)
        )
        end = [] if self._end is None else [self._end]
        learned = [*after, *end]
        return Demonstrated.of([*before, *learned], [0] * len(before) + [1] * len(learned), where)


def _fields(
    row: dict[str, Any], format: DataConfig, pairs: bool, where: str
) -> tuple[list[tuple[str | Messages, str | Messages | None]], dict[str, Any] | None, list[Any] | None]:
    """The chats, metadata and tools of a row. Raises BadData if something is not of its kind."""
    return (
        _chats(row, format, pairs, where),
        None if format.metadata_key is None else metadata_of(row.get(format.metadata_key), format, where),
        None if format.tool_key is None else tools_of(row.get(format.tool_key), format, where),
    )


def _chats(
    row: dict[str, Any], format: DataConfig, pairs: bool, where: str
) -> list[tuple[str | Messages, str | Messages | None]]:
    """The prompts and responses of a row: one, or two of which the first is preferred. A response is None where the
    prompt is a whole chat. Raises BadData if something is not of its kind."""
    prompt = None
    if row.get(format.input_key) is not None:
        prompt = prompt_of(row[format.input_key], format.input_key, format, where)
    if pairs:
        chosen, rejected = (prompt_of(row[key], key, format, where) for key in (format.chosen_key, format.rejected_key))
        return _pair(prompt, chosen, rejected, format, where)
    if prompt is None:
        raise BadData(f"{where}: {format.input_key!r} is null: correct the row or name another field in input_key")
    if format.response_key is not None:
        return [(prompt, prompt_of(row[format.response_key], format.response_key, format, where))]
    if isinstance(prompt, str):
        raise BadData(
            f"{where}: {format.input_key!r} is a string and data.response_key is null: name the column of the "
            "responses, or give chats as lists of messages"
        )
    return [(prompt, None)]


def _pair(
    prompt: str | Messages | None, chosen: str | Messages, rejected: str | Messages, format: DataConfig, where: str
) -> list[tuple[str | Messages, str | Messages | None]]:
    """Two responses to one prompt: that which is given, or where whole chats are, what both begin with."""
    if not isinstance(chosen, str) and not isinstance(rejected, str) and chosen[0]["role"] != "assistant":
        shared = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    if not prompt:
        raise BadData(
            f"{where}: {format.chosen_key!r} and {format.rejected_key!r} have no prompt: give it in "
            f"{format.input_key!r}, or let both be chats that begin with it"
        )
    if not chosen or not rejected:
        raise BadData(f"{where}: one of {format.chosen_key!r} and {format.rejected_key!r} is a part of the other")
    return [(prompt, chosen), (prompt, rejected)]
