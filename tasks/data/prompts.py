"""From a row of data to the tokens of a prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.data import RowFormat
from cairn.engines.images import Image
from cairn.engines.tokenizers import reads_clock
from cairn.storage import canonical
from cairn.tasks.data.columns import Messages, label_of, metadata_of, prompt_of, tools_of
from cairn.tasks.data.errors import BadData, BadPrompt
from cairn.tasks.data.images import RowImages, with_parts
from cairn.tasks.data.rows import FILES, open_rows, without_slice

Check = Callable[[dict[str, Any] | None, str], None]
"""Looks at the metadata of a row, of which the second argument says where it stands. Raises BadPlugin."""


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
    images: tuple[Image, ...] = ()
    """In the order of their placeholders, of which each has as many among `prompt_ids` as it takes, and one in
    `prompt_text`."""


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


class OverRows:
    """One data set. Holds the place of every row, and no row. Thread-safe."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

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


class PromptData(OverRows):
    """The prompts of one data set."""

    def __init__(
        self,
        rows: Rows,
        format: RowFormat,
        tokenizer: Any,
        images: RowImages | None = None,
        tools: list[Any] | None = None,
        is_new: bool = True,
    ) -> None:
        """`tools`: default tools for the chat template. `is_new`: see `open`."""
        super().__init__(rows)
        self._tools = tools
        self._is_new = is_new
        self._tokenizer = tokenizer
        self._format = format
        self._images = images

    @classmethod
    def open(
        cls,
        format: RowFormat,
        path: str,
        tokenizer: Any,
        check: Check | None = None,
        tools: list[Any] | None = None,
        is_new: bool = True,
    ) -> "PromptData":
        """Open what the data source gives for `path`, and check every row: see `open_rows`.

        `tokenizer` is a Hugging Face tokenizer. `check` looks at every row besides. `tools`: default tools for the chat
        template. `is_new`: for what begins now; a run that began with labels that are no text and no number keeps
        their JSON. Raises BadData also where the tokenizer has no chat template but needs one.
        """
        require_template(format, tokenizer)
        required = {format.input_key: "input_key"}
        if format.label_key is not None:
            required[format.label_key] = "label_key"
        images = None
        if format.multimodal_keys:
            beside = without_slice(path) if format.data_source_path == FILES else None
            images = RowImages(format, tokenizer.name_or_path, beside)
        optional = {key for key in (format.metadata_key, format.tool_key) if key is not None}
        optional.update(format.multimodal_keys.values())

        def looked_at(row: dict[str, Any], where: str) -> None:
            metadata = _fields(row, format, where, is_new).metadata
            if images is not None:
                images.check(row, where)
            if check is not None:
                try:
                    check(metadata, where)
                except BadPlugin as error:
                    raise BadData(str(error)) from error

        pictures = set(format.multimodal_keys.values())
        rows = open_rows(format.data_source_path, path, required, optional, looked_at, pictures)
        if images is not None:
            images.end_checks(path)
        return cls(rows, format, tokenizer, images, tools, is_new)

    @property
    def fingerprint(self) -> str:
        """sha256, in hex, of all that the data source gives, and of the images that its rows name."""
        return super().fingerprint if self._images is None else self._images.fingerprint(super().fingerprint)

    def row(self, index: int) -> PromptRow:
        """Read, render and tokenize the row at `index`. Raises BadPrompt if the chat template refuses it, it is empty,
        or it holds what is no text."""
        where = f"{self.path}, row {index + 1}"
        row = self._rows.read(index)
        prompt, label, metadata, tools = _fields(row, self._format, where, self._is_new)
        text = self._render(prompt, tools, where) if self._format.apply_chat_template else prompt
        require_text(str(text) + (label or ""), where)
        # The template writes the special tokens that it wants; a plain prompt is taken literally, as in slime.
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise BadPrompt(f"{where} has an empty prompt: give it some text or remove the row")
        images: tuple[Image, ...] = ()
        if self._images is not None:
            images = self._images.of(row, where)
            ids = self._images.laid(ids, images, where)
        if tools is not None:
            metadata = {**(metadata or {}), "tools": tools}
        return PromptRow(index, prompt, str(text), tuple(ids), label, metadata, images)

    def dated(self, rows: Sequence[PromptRow]) -> dict[str, str]:
        """Of an evaluation's key: the digest of prompts under `prompts` where the chat template tells the time, else
        nothing."""
        if not self._format.apply_chat_template or not reads_clock(self._tokenizer):
            return {}
        return {"prompts": canonical.digest([row.prompt_text for row in rows])}

    def require_all(self) -> None:
        """Make every prompt once: none of a benchmark's can be passed over. Raises BadPrompt."""
        for index in range(len(self)):
            self.row(index)

    def _render(self, prompt: str | Messages, tools: list[Any] | None, where: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._images is not None:
            messages = with_parts(messages, where)
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools or self._tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._format.apply_chat_template_kwargs,
            )
        except Exception as error:  # a template raises what it likes
            raise BadPrompt(f"{where}: the chat template refuses the prompt ({error}): correct the row") from error
        return text


def require_template(format: RowFormat, tokenizer: Any) -> None:
    """Raise BadData where a chat template is to be applied and the tokenizer has none."""
    if format.apply_chat_template and not tokenizer.chat_template:
        raise BadData(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template: "
            "set apply_chat_template to false, or use a model whose tokenizer has one"
        )


def require_text(text: str, where: str) -> None:
    """Raise BadPrompt where a row holds what cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadPrompt(
            f"{where} holds half of a surrogate pair, which is no character: correct or remove the row"
        ) from None


class _Fields(NamedTuple):
    prompt: str | Messages
    label: str | None
    metadata: dict[str, Any] | None
    tools: list[Any] | None


def _fields(row: dict[str, Any], format: RowFormat, where: str, is_new: bool) -> _Fields:
    """What the configuration takes of a row. Raises BadData if something is not of its kind."""
    return _Fields(
        prompt_of(row[format.input_key], format.input_key, format, where),
        None if format.label_key is None else label_of(row[format.label_key], format, where, is_new),
        None if format.metadata_key is None else metadata_of(row.get(format.metadata_key), format, where),
        None if format.tool_key is None else tools_of(row.get(format.tool_key), format, where),
    )
