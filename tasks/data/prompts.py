"""Conversion of a row of data to the tokens of a prompt."""

import base64
import binascii
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import fsspec

from cairn.configs.errors import BadData, BadPrompt
from cairn.configs.plugins import BadPlugin
from cairn.configs.schema.data import RowFormat
from cairn.engines.models.tokenizers import reads_clock
from cairn.engines.types.images import BadImage, Image, decode, size_of
from cairn.storage.store import canonical
from cairn.tasks.data.rows import FILES, Messages, label_of, metadata_of, open_rows, prompt_of, tools_of, without_slice

# Images of rows, and their positions in the prompt.


PLACE = "<image>"
"""Placeholder of an image in a text."""

_DATA_URL = "data:"
_MAX_BYTES = 256 * 1024 * 1024
"""Largest encoded picture, in bytes."""


class RowImages:
    """Images of a data set's rows, in the size in which a model sees them.

    A column, `multimodal_keys.image`, contains one image or a list of them:

    | value | meaning |
    |---|---|
    | `{"bytes": …}` of Parquet | the encoded picture, as in Hugging Face's data sets |
    | `data:image/png;base64,…` | the encoded picture as text |
    | a path, or `{"path": …}` without bytes | a file next to the data's file, or at an absolute path of this machine |

    The images replace each `<image>` in the prompt, or each part `{"type": "image"}` of a message, in order.
    """

    def __init__(self, format: RowFormat, folder: str, base_file: str | None = None) -> None:
        """Create the reader. `folder`: of the model. `base_file`: the file of the rows, whose folder relative paths
        start from. Raises BadData where the model sees no images."""
        from cairn.engines.models.configs import sees_images
        from cairn.engines.models.folders import check_model_folder  # what few data sets need
        from cairn.engines.models.vision import image_processor

        config = check_model_folder(folder)
        if not sees_images(config):
            raise BadData(
                f"multimodal_keys names a column of images, but the model in {folder} ({config.model_type}) reads "
                "none: leave it out, or use a model of images and text"
            )
        self.column = format.multimodal_keys["image"]
        self._pixels = format.min_pixels, format.max_pixels
        self._folder = None if base_file is None else os.path.dirname(base_file)
        self._processor = image_processor(folder)
        size: Any = self._processor.size
        if (format.min_pixels or 0) > (most := format.max_pixels or size.longest_edge):
            raise BadData(
                f"min_pixels is {format.min_pixels}, above the {most} pixels that the model's own processor allows: "
                "set max_pixels too"
            )
        self._token: int = config.image_token_id
        self._files: dict[str, str] | None = None
        """SHA-256 of every file that a row names, by its path; None until all rows were checked."""
        self._checked_files: dict[str, str] = {}
        self._has_column = False

    def check(self, row: Mapping[str, Any], where: str) -> None:
        """Check the header of every image of a row. Raises BadPrompt."""
        self._of(row, where)
        self._has_column |= self.column in row

    def end_checks(self, path: str) -> None:
        """End the checks of all rows of `path`: no file may change from now on. Raises BadData where no row has the
        column."""
        if not self._has_column:
            raise BadData(f"multimodal_keys.image is {self.column}, but no row of {path} has it: correct it")
        self._files = self._checked_files

    def fingerprint(self, of_rows: str) -> str:
        """Return the SHA-256, in hex, of the rows and of the files that they name. `of_rows`: that of the rows
        alone."""
        return canonical.digest({"rows": of_rows, "files": self._files}) if self._files else of_rows

    def of(self, row: Mapping[str, Any], where: str) -> tuple[Image, ...]:
        """Return the images of a row, each decoded once as a check. Raises BadPrompt."""
        images = self._of(row, where)
        for number, image in enumerate(images, 1):
            try:
                decode(image.data)
            except BadImage as error:
                raise BadPrompt(f"{where}: image {number} {error}: correct or remove the row") from None
        return images

    def expand_placeholders(self, ids: Sequence[int], images: Sequence[Image], where: str) -> tuple[int, ...]:
        """Return a prompt's token ids with each image's placeholder repeated as often as the image needs. Raises
        BadPrompt."""
        from cairn.engines.models.vision import places_of

        places = [place for place, id in enumerate(ids) if id == self._token]
        if len(places) != len(images):
            raise BadPrompt(
                f"{where} has {len(images)} images, but {len(places)} places for them in its prompt: write {PLACE} "
                "once for each image"
            )
        if any(after - place == 1 for place, after in pairwise([*places, len(ids)])):
            raise BadPrompt(f"{where} has an image with no text after it: add text after each image")
        left, expanded = iter(images), list[int]()
        for id in ids:
            expanded += [id] * places_of(self._processor, next(left)) if id == self._token else [id]
        return tuple(expanded)

    def _of(self, row: Mapping[str, Any], where: str) -> tuple[Image, ...]:
        from cairn.engines.models.vision import resized

        images = []
        value = row.get(self.column)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for number, one in enumerate(values, 1):
            try:
                data = self._bytes(one, where)
                height, width = size_of(data)
                images.append(Image(data, *resized(self._processor, height, width, *self._pixels)))
            except (BadImage, ValueError) as error:
                raise BadPrompt(f"{where}: image {number} {error}: correct or remove the row") from None
        return tuple(images)

    def _bytes(self, value: Any, where: str) -> bytes:
        """Return the bytes of an image from its value in a row. Raises BadImage."""
        if isinstance(value, Mapping):
            value = value.get("bytes") or value.get("path")
        if not isinstance(value, str):
            raise BadImage(f"is a {type(value).__name__}, but must be bytes, a data URL or a path")
        if value.startswith(_DATA_URL):
            try:
                return base64.b64decode(value.partition(";base64,")[2], validate=True)
            except binascii.Error:
                raise BadImage("is a data URL with invalid base64") from None
        return self._read(value, where)

    def _read(self, path: str, where: str) -> bytes:
        if "://" in path:
            raise BadImage(f"is at the address {path}, which is not downloaded: put the file next to the data")
        if not os.path.isabs(path) and self._folder is None:
            raise BadImage(f"has the relative path {path}, but the data have no folder: use an absolute path")
        remote = self._folder is not None and "://" in self._folder
        if remote and os.path.isabs(path):
            raise BadImage(f"has the absolute path {path}, but the data are remote: use a path relative to the data")
        url = f"{self._folder}/{path}" if remote else os.path.join(self._folder or "", path)
        try:
            with fsspec.open(url, "rb") as file:
                data: bytes = file.read(_MAX_BYTES + 1)
        except FileNotFoundError:
            raise BadImage(f"does not exist at {url}") from None
        # Each fsspec file system, and each library below it, raises its own exceptions.
        except Exception as error:
            raise BadImage(f"cannot be read at {url} ({error})") from error
        if len(data) > _MAX_BYTES:
            raise BadImage(f"has more than {_MAX_BYTES} bytes at {url}")
        sha256 = hashlib.sha256(data).hexdigest()
        if self._files is None:
            self._checked_files[path] = sha256
        elif self._files.get(path, sha256) != sha256:
            raise BadData(f"{where}: {url} was changed while it was in use: put the old file back, or start a new run")
        return data


def with_parts(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return messages whose texts are split into parts at the images, as chat templates expect. Raises BadPrompt."""
    return [{**message, "content": _parts(message.get("content"), where)} for message in messages]


def _parts(content: Any, where: str) -> Any:
    if isinstance(content, str):
        if PLACE not in content:
            return content
        texts = content.split(PLACE)
        parts: list[dict[str, Any]] = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]
    if not isinstance(content, list):
        return content
    for part in content:
        if part["type"] == "image" and len(part) > 1:
            raise BadPrompt(f"{where}: a part of a message contains an image: put it into the column of images")
    return content


Check = Callable[[dict[str, Any] | None, str], None]
"""Function that checks the metadata of a row; its second argument is the row's location. Raises BadPlugin."""


@dataclass(frozen=True)
class Row:
    """Row of the data and, once it is drawn, its group."""

    index: int
    """Position in the data set, from 0; a sliced file is counted from the slice's start."""
    prompt_ids: tuple[int, ...]
    group_id: int = field(default=0, kw_only=True)
    """Position in the stream: unique in a run."""
    epoch: int = field(default=0, kw_only=True)


@dataclass(frozen=True)
class PromptRow(Row):
    """Prompt that is ready for generation and grading."""

    prompt: str | Messages
    """Prompt as in the row."""
    prompt_text: str
    """Text that the model reads, with its special tokens."""
    label: str | None
    metadata: dict[str, Any] | None
    """Metadata as in the row. A row's tools are added under `tools`, as in slime."""
    images: tuple[Image, ...] = ()
    """Images in the order of their placeholders. Each has as many placeholders in `prompt_ids` as it needs, and one in
    `prompt_text`."""


class Rows(Protocol):
    """Rows that prompts are made of: a `RowFile`, or rows derived from one."""

    @property
    def path(self) -> str:
        """Name of the data in messages."""

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all rows."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> dict[str, Any]:
        """Return the row at `index`, from 0."""


class OverRows:
    """Data set read by index. Stores the position of every row, and no row. Thread-safe."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    @property
    def path(self) -> str:
        """Name of the data in messages."""
        return self._rows.path

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all that the data source provides; for a file, of its bytes."""
        return self._rows.fingerprint

    def __len__(self) -> int:
        return len(self._rows)


class PromptData(OverRows):
    """Prompts of one data set."""

    def __init__(
        self,
        rows: Rows,
        format: RowFormat,
        tokenizer: Any,
        images: RowImages | None = None,
        tools: list[Any] | None = None,
        workers: int = 0,
    ) -> None:
        """Create the data set. `tools`: default tools for the chat template. `workers`: threads of `prepare`."""
        super().__init__(rows)
        self._pool = ThreadPoolExecutor(workers, "data") if workers else None
        self._prepared: dict[int, Future[PromptRow]] = {}
        self._tools = tools
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
        workers: int = 0,
    ) -> "PromptData":
        """Open what the data source provides for `path`, and check every row: see `open_rows`.

        Raises BadData, also where the tokenizer has no chat template but needs one.

        Args:
            tokenizer: a Hugging Face tokenizer.
            check: an additional check of every row.
            tools: default tools for the chat template.
            workers: threads that make prompts ahead.
        """
        require_template(format, tokenizer)
        required = {format.input_key: "input_key"}
        if format.label_key is not None:
            required[format.label_key] = "label_key"
        images = None
        if format.multimodal_keys:
            base_file = without_slice(path) if format.data_source_path == FILES else None
            images = RowImages(format, tokenizer.name_or_path, base_file)
        optional = {key for key in (format.metadata_key, format.tool_key) if key is not None}
        optional.update(format.multimodal_keys.values())

        def check_row(row: dict[str, Any], where: str) -> None:
            metadata = _fields(row, format, where).metadata
            if images is not None:
                images.check(row, where)
            if check is not None:
                try:
                    check(metadata, where)
                except BadPlugin as error:
                    raise BadData(str(error)) from error

        pictures = set(format.multimodal_keys.values())
        rows = open_rows(format.data_source_path, path, required, optional, check_row, pictures)
        if images is not None:
            images.end_checks(path)
        return cls(rows, format, tokenizer, images, tools, workers)

    @property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of all that the data source provides, and of the images that its rows name."""
        return super().fingerprint if self._images is None else self._images.fingerprint(super().fingerprint)

    def prepare(self, indices: Iterable[int]) -> None:
        """Begin to make the prompts of rows that will be asked for next, in threads of their own. A prompt depends on
        its row alone, so it is the same as if it were made later."""
        if self._pool is not None:
            prepared = self._prepared
            self._prepared = {one: prepared.get(one) or self._pool.submit(self._row, one) for one in indices}

    def row(self, index: int) -> PromptRow:
        """Read, render and tokenize the row at `index`. Raises BadPrompt if the chat template rejects it, it is empty,
        or it contains something that is not text."""
        prepared = self._prepared.pop(index, None)
        return self._row(index) if prepared is None else prepared.result()

    def _row(self, index: int) -> PromptRow:
        where = f"{self.path}, row {index + 1}"
        row = self._rows.read(index)
        prompt, label, metadata, tools = _fields(row, self._format, where)
        text = self._render(prompt, tools, where) if self._format.apply_chat_template else prompt
        require_text(str(text) + (label or ""), where)
        # The template writes the special tokens that it wants. A plain prompt is taken literally, as in slime.
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if not ids:
            raise BadPrompt(f"{where} has an empty prompt: give it some text or remove the row")
        images: tuple[Image, ...] = ()
        if self._images is not None:
            images = self._images.of(row, where)
            ids = self._images.expand_placeholders(ids, images, where)
        if tools is not None:
            metadata = {**(metadata or {}), "tools": tools}
        return PromptRow(index, tuple(ids), prompt, str(text), label, metadata, images)

    def clock_key(self, rows: Sequence[PromptRow]) -> dict[str, str]:
        """Return a part of an evaluation's key: the digest of the prompts under `prompts` if the chat template reads
        the clock, otherwise nothing."""
        if not self._format.apply_chat_template or not reads_clock(self._tokenizer):
            return {}
        return {"prompts": canonical.digest([row.prompt_text for row in rows])}

    def require_all(self) -> None:
        """Create every prompt once, since no prompt of a benchmark may be skipped. Raises BadPrompt."""
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
    """Raise BadData where a chat template must be applied and the tokenizer has none."""
    if format.apply_chat_template and not tokenizer.chat_template:
        raise BadData(
            f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template: "
            "set apply_chat_template to false, or use a model whose tokenizer has one"
        )


def require_text(text: str, where: str) -> None:
    """Raise BadPrompt where a row contains text that cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadPrompt(
            f"{where} holds half of a surrogate pair, which is not a character: correct or remove the row"
        ) from None


class _Fields(NamedTuple):
    prompt: str | Messages
    label: str | None
    metadata: dict[str, Any] | None
    tools: list[Any] | None


def _fields(row: dict[str, Any], format: RowFormat, where: str) -> _Fields:
    """Return the fields of a row that the configuration names. Raises BadData if one has the wrong type."""
    return _Fields(
        prompt_of(row[format.input_key], format.input_key, format, where),
        label_of(row, format, where),
        metadata_of(row, format, where),
        tools_of(row, format, where),
    )
