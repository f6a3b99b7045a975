"""From a row of data to the tokens of a prompt."""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from jinja2 import TemplateError

from cairn.configs.schema.data import RowFormat
from cairn.tasks.data.errors import BadData, BadPrompt
from cairn.tasks.data.rows import open_rows

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class PromptRow:
    """One prompt, ready to be generated from and graded."""

    index: int
    """Position in the data set, from 0; a sliced file is counted from the slice's start."""
    prompt: str | Messages
    """As the row has it."""
    prompt_text: str
    """What the model reads, special tokens written out."""
    prompt_ids: tuple[int, ...]
    label: str | None
    metadata: dict[str, Any] | None
    """As the row has it; with tools, they are added under `tools`, as in slime."""


class Rows(Protocol):
    """What prompts are made of: a `RowFile`, or rows that are made of one."""

    @property
    def path(self) -> str:
        """The data, as messages name it."""

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of all that there is."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """The row at `index`, from 0."""


class PromptData:
    """The prompts of one data set. Holds the place of every row, and no row. Thread-safe."""

    def __init__(self, rows: Rows, format: RowFormat, tokenizer: Any) -> None:
        self._rows = rows
        self._format = format
        self._tokenizer = tokenizer

    @classmethod
    def open(cls, format: RowFormat, path: str, tokenizer: Any) -> "PromptData":
        """Open what the data source gives for `path`, and check every row: see `open_rows`.

        `tokenizer` is a Hugging Face tokenizer. Raises BadData also where it has no chat template but needs one.
        """
        if format.apply_chat_template and not tokenizer.chat_template:
            raise BadData(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template: "
                "set apply_chat_template to false, or use a model whose tokenizer has one"
            )
        required = {format.input_key: "input_key"}
        if format.label_key is not None:
            required[format.label_key] = "label_key"
        optional = {key for key in (format.metadata_key, format.tool_key) if key is not None}
        rows = open_rows(
            format.data_source_path, path, required, optional, lambda row, where: _fields(row, format, where)
        )
        return cls(rows, format, tokenizer)

    @property
    def path(self) -> str:
        """The data, as messages name it."""
        return self._rows.path

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of all that the data source gives: of a file, its bytes."""
        return self._rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> PromptRow:
        """Read, render and tokenize the row at `index`. Raises BadPrompt if the chat template refuses it, it is empty,
        or it holds what is no text."""
        where = f"{self.path}, row {index + 1}"
        prompt, label, metadata, tools = _fields(self._rows.read(index), self._format, where)
        text = self._render(prompt, tools, where) if self._format.apply_chat_template else prompt
        for written in (str(text), label or ""):
            try:
                written.encode()
            except UnicodeEncodeError:
                raise BadPrompt(
                    f"{where} holds half of a surrogate pair, which is no character: correct or remove the row"
                ) from None
        # The template writes the special tokens that it wants; a plain prompt is taken literally, as in slime.
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise BadPrompt(f"{where} has an empty prompt: give it some text or remove the row")
        if tools is not None:
            metadata = {**(metadata or {}), "tools": tools}
        return PromptRow(index, prompt, str(text), tuple(ids), label, metadata)

    def require_all(self) -> None:
        """Make every prompt once: none of a benchmark's can be passed over. Raises BadPrompt."""
        for index in range(len(self)):
            self.row(index)

    def _render(self, prompt: str | Messages, tools: list[Any] | None, where: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._format.apply_chat_template_kwargs,
            )
        except TemplateError as error:
            raise BadPrompt(f"{where}: the chat template refuses the prompt ({error}): correct the row") from error
        return text


class _Fields(NamedTuple):
    prompt: str | Messages
    label: str | None
    metadata: dict[str, Any] | None
    tools: list[Any] | None


def _fields(row: dict[str, Any], format: RowFormat, where: str) -> _Fields:
    """What the configuration takes of a row. Raises BadData if something is not of its kind."""
    return _Fields(
        _prompt(row[format.input_key], format, where),
        None if format.label_key is None else _label(row[format.label_key], format, where),
        None if format.metadata_key is None else _metadata(row.get(format.metadata_key), format, where),
        None if format.tool_key is None else _tools(row.get(format.tool_key), format, where),
    )


def _prompt(value: Any, format: RowFormat, where: str) -> str | Messages:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and m.get("role") for m in value):
        raise BadData(
            f"{where}: {format.input_key!r} is neither a string nor a list of messages with a role and content: "
            "correct the row or name another field in input_key"
        )
    if not format.apply_chat_template:
        raise BadData(
            f"{where}: {format.input_key!r} is a list of messages but apply_chat_template is false: "
            "set it to true or give the prompt as a string"
        )
    # Parquet gives every message all fields that any message has.
    return [{name: content for name, content in message.items() if content is not None} for message in value]


def _label(value: Any, format: RowFormat, where: str) -> str | None:
    label = value if value is None or isinstance(value, str) else json.dumps(value)
    if format.label_pattern is None:
        return label
    match = re.search(format.label_pattern, label or "")
    if match is None or match[1] is None:
        raise BadData(
            f"{where}: {format.label_key!r} has no match for label_pattern {format.label_pattern!r}: "
            "correct the row or the pattern"
        )
    return match[1].strip()


def _metadata(value: Any, format: RowFormat, where: str) -> dict[str, Any] | None:
    if value is not None and not isinstance(value, dict):
        raise BadData(f"{where}: {format.metadata_key!r} is no mapping: correct the row or set metadata_key to null")
    return value


def _tools(value: Any, format: RowFormat, where: str) -> list[Any] | None:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = ""
    if value is not None and not isinstance(value, list):
        raise BadData(f"{where}: {format.tool_key!r} is no list of tools: correct the row or set tool_key to null")
    return value or None
