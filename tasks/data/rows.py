"""Rows of a data source, read by index without holding them in memory.

Opening a source reads it once: its content is hashed, every row is checked, and the position of each row is recorded.
Rows are then read from local disk: from the file itself if it is a local JSONL file, otherwise from an unnamed
temporary copy with one JSON object a line, which disappears with the process.

A source is a file in this folder with `rows(path)`, or a function of the user's. It yields mappings of JSON values, the
same ones in the same order at every call. A run records their digest, and refuses to resume with others.

The columns of a row are checked by type. Other values raise an error that names the row and the column:

| column | type | also accepted |
|---|---|---|
| prompt, response | text, or messages | JSON of messages |
| a message's content | text; parts of text and images where the model sees images | parts of text alone |
| a tool call's arguments | a mapping | JSON of a mapping |
| label | text | a number; a whole one is written without a point; a mapping, which becomes its JSON |
| metadata | a mapping | JSON of a mapping |
| tools | a list of mappings | JSON of the list, or of each tool |
"""

import hashlib
import json
import math
import os
import re
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from cairn.configs.errors import BadData
from cairn.configs.kinds import SOURCE
from cairn.configs.schema.data import RowFormat
from cairn.storage.store.canonical import from_json
from cairn.storage.store.errors import NoSpace, naming_full
from cairn.tasks.data.files import Binary, is_parquet, open_file, parquet_rows, parsed

# Values of columns: prompts, labels, metadata and tools.


Messages = list[dict[str, Any]]


def prompt_of(value: Any, key: str, format: RowFormat, where: str) -> str | Messages:
    """Return the prompt in column `key`: a string, or the messages of a chat. Raises BadData."""
    if isinstance(value, str):
        messages = _messages_in(value)
        if messages is None or not format.apply_chat_template:
            return value
        value = messages
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and m.get("role") for m in value):
        raise BadData(
            f"{where}: {key!r} is neither a string nor a list of messages with a role and content: "
            f"correct the row or name another field in {_option(key, format)}"
        )
    if not format.apply_chat_template:
        raise BadData(
            f"{where}: {key!r} is a list of messages but apply_chat_template is false: "
            "set it to true or give the prompt as a string"
        )
    images = bool(format.multimodal_keys)
    return [_message(m, images, f"{where}: message {number} of {key!r}") for number, m in enumerate(value, 1)]


def label_of(row: Mapping[str, Any], format: RowFormat, where: str) -> str | None:
    """Return the text of a row's label, cut by `label_pattern`; None without a column of labels. Raises BadData."""
    if format.label_key is None:
        return None
    label = label_text(row[format.label_key], format.label_key, where)
    if format.label_pattern is None:
        return label
    match = re.search(format.label_pattern, label or "")
    if match is None or match[1] is None:
        raise BadData(
            f"{where}: {format.label_key!r} has no match for label_pattern {format.label_pattern!r}: "
            "correct the row or the pattern"
        )
    return match[1].strip()


def label_text(value: Any, key: str, where: str) -> str | None:
    """Return the text of the label in column `key`, of a mapping its JSON. Raises BadData."""
    if isinstance(value, Mapping):
        return json.dumps(value, sort_keys=True)
    if not _is_text_or_number(value):
        raise BadData(
            f"{where}: {key!r} is a label and holds {_shown(value)}, which is not text or a number: write it as text, "
            "or name another field"
        )
    if value is None or isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def metadata_of(row: Mapping[str, Any], format: RowFormat, where: str) -> dict[str, Any] | None:
    """Return the mapping of a row's metadata; None without one. Raises BadData."""
    value = None if format.metadata_key is None else row.get(format.metadata_key)
    if isinstance(value, str):
        try:
            value = from_json(value)
        except ValueError as error:
            raise BadData(
                f"{where}: {format.metadata_key!r} is a string, but not a JSON object ({error}): correct the row or "
                "set metadata_key to null"
            ) from None
    if value is not None and not isinstance(value, dict):
        raise BadData(f"{where}: {format.metadata_key!r} is not a mapping: correct the row or set metadata_key to null")
    return value


def tools_of(row: Mapping[str, Any], format: RowFormat, where: str) -> list[Any] | None:
    """Return the tools of a row: a list, or the JSON of one; None without any. Raises BadData."""
    value = None if format.tool_key is None else _read(row.get(format.tool_key), list)
    tools = [_read(tool, dict) for tool in value] if isinstance(value, list) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadData(f"{where}: {format.tool_key!r} is not a list of tools: correct the row or set tool_key to null")
    return tools or None


def _messages_in(text: str) -> Any:
    """Return the messages that a text contains as JSON; None where the text is itself the prompt."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    value = _read(text, list)
    is_chat = isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value)
    return value if is_chat else None


def _message(message: Mapping[str, Any], images: bool, where: str) -> dict[str, Any]:
    """Return a message without its null fields. Raises BadData."""
    fields = {name: value for name, value in message.items() if value is not None}
    if not isinstance(fields["role"], str):
        raise BadData(f"{where} has the role {_shown(fields['role'])}, which is not text: correct the row")
    if "content" in fields:
        fields["content"] = _content(fields["content"], images, where)
    elif fields["role"] != "assistant":
        raise BadData(f"{where} has no content: correct the row")
    if "tool_calls" in fields:
        calls = _read(fields["tool_calls"], list)
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadData(f"{where} has tool_calls that are not a list of mappings: correct the row")
        fields["tool_calls"] = [_call(call) for call in calls]
    return fields


def _content(content: Any, images: bool, where: str) -> Any:
    """Return the content as text or, with `images`, a list of parts unchanged. Raises BadData."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    parts = [{n: v for n, v in part.items() if v is not None} if isinstance(part, dict) else {} for part in parts]
    is_text = [part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts]
    if not parts or not all(
        text or (images and part.get("type") == "image") for part, text in zip(parts, is_text, strict=True)
    ):
        kinds = "text and images" if images else "text"
        raise BadData(
            f"{where} has the content {_shown(content)}, which is neither text nor parts of {kinds}: correct the row"
        )
    return parts if images else "".join(part["text"] for part in parts)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as a mapping if they are one: templates would quote text once more."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    return {**call, "arguments": _read(call["arguments"], dict)} if "arguments" in call else dict(call)


def _read(value: Any, kind: type) -> Any:
    """Return the value of a JSON text if it has type `kind`; otherwise the value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed_value = from_json(value)
    except ValueError:
        return value
    return parsed_value if isinstance(parsed_value, kind) else value


def _is_text_or_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _option(key: str, format: RowFormat) -> str:
    """Return the option that names a column."""
    return next(name for name, value in format if name.endswith("_key") and value == key)


Check = Callable[[dict[str, Any], str], object]
"""Function that checks one row and raises BadData. Its second argument is the row's location."""

FILES = "files"
"""Name of the source that reads files. A file's digest is that of its bytes, and a local JSONL file is not copied."""

_SLICE = re.compile(r"(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]")


class RowFile:
    """Rows of one source or of a slice of it. Thread-safe."""

    def __init__(self, path: str, lines: Binary, offsets: array, fingerprint: str) -> None:
        self.path = path
        self.fingerprint = fingerprint
        """SHA-256, in hex, of all that the source provides; for a file, of its bytes."""
        self._lines = lines
        self._offsets = offsets
        self._unchanged = _stamp(lines)
        self._lock = threading.Lock()
        weakref.finalize(self, lines.close)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, index: int) -> dict[str, Any]:
        """Return the row at `index`, from 0. Raises BadData if the file was changed in place since it was opened."""
        with self._lock:
            if _stamp(self._lines) != self._unchanged:
                raise BadData(f"{self.path} was changed while it was in use: put the old file back, or start a new run")
            self._lines.seek(self._offsets[index])
            line = self._lines.readline()
        row: dict[str, Any] = from_json(line)
        return row


def open_rows(
    source: str,
    path: str,
    required: Mapping[str, str],
    optional: Collection[str],
    check: Check,
    pictures: Collection[str] = (),
) -> RowFile:
    """Open what `source` provides for `path`, and check each of its rows, including those outside the slice.

    Args:
        path: may end in a slice such as `@[100:200]` or `@[-50:]`.
        required: maps the fields that every row must have to the options that name them. Other columns of a Parquet
            file are not read, unless they are `optional`.
        pictures: columns whose bytes are not text, see `files.parquet_rows`.

    Raises:
        BadData: the source fails or provides something else than rows; a file is missing, empty, of another format or
            torn, or lacks a field; the slice has no row; or `check` raises it.
        BadPlugin: the source does not exist.
        NoSpace: the temporary copy does not fit on this machine.
    """
    match, url = _SLICE.fullmatch(path), without_slice(path)
    if source == FILES:
        lines = open_file(url)
        fingerprint = hashlib.file_digest(lines, "sha256").hexdigest()
        if is_parquet(url):
            columns = partial(_columns, required=required, optional=optional, url=url)
            lines = _spooled(parquet_rows(lines, url, columns, pictures))
    else:
        lines = _spooled(_rows_of_function(source, url))
        lines.seek(0)
        fingerprint = hashlib.file_digest(lines, "sha256").hexdigest()
    offsets = _index(lines, url, "line" if source == FILES and not is_parquet(url) else "row", required, check)
    if not offsets:
        raise BadData(f"{url} has no rows: add at least one")
    if match:
        start, stop = (int(match[name]) if match[name] else None for name in ("start", "stop"))
        total, offsets = len(offsets), offsets[start:stop]
        if not offsets:
            raise BadData(f"{path} selects none of the {total} rows: correct the slice")
    return RowFile(path, lines, offsets, fingerprint)


def without_slice(path: str) -> str:
    """Return a path without the slice that it may end in."""
    match = _SLICE.fullmatch(path)
    return match["path"] if match else path


def _rows_of_function(source: str, path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows that a function of the user's provides. Raises BadData."""
    function, number = SOURCE.load(source), 0
    try:
        for number, row in enumerate(function(path), 1):
            if not isinstance(row, Mapping):
                kind = type(row).__name__
                raise BadData(
                    f"the data source {source!r} returned {kind} as row {number} of {path}: let it be a mapping"
                )
            yield dict(row)
    except (BadData, NoSpace):
        raise
    # User code may raise any exception. Show it to the user.
    except Exception as error:
        raise BadData(
            f"the data source {source!r} failed on {path} after {number} rows with {error!r}: correct it"
        ) from error


def _spooled(rows: Iterable[Mapping[str, Any]]) -> Binary:
    """Write rows to a temporary file, one JSON object a line. Raises BadData."""
    lines = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the rows are read
    with naming_full(tempfile.gettempdir()):
        for number, row in enumerate(rows, 1):
            try:
                lines.write(json.dumps(row).encode() + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise BadData(f"row {number} is not JSON ({error}): let the data source give JSON values") from None
        lines.flush()
    return lines


def _columns(present: list[str], *, required: Mapping[str, str], optional: Collection[str], url: str) -> list[str]:
    _require(present, required, url)
    return [name for name in present if name in required or name in optional]


def _index(file: Binary, url: str, unit: str, required: Mapping[str, str], check: Check) -> array:
    """Return the byte offset of each row, skipping blank lines. Checks every row."""
    offsets, offset = array("Q"), 0
    file.seek(0)
    for number, line in enumerate(file, 1):
        if not line.isspace():
            where = f"{url}, {unit} {number}"
            row = parsed(line, where)
            _require(row, required, where)
            check(row, where)
            offsets.append(offset)
        offset += len(line)
    return offsets


def _require(fields: Collection[str], required: Mapping[str, str], where: str) -> None:
    for name, option in required.items():
        if name not in fields:
            raise BadData(
                f"{where} has no field {name!r}, which {option} names; it has {', '.join(sorted(fields)) or 'none'}: "
                f"set {option} to one of these"
            )


def _stamp(file: Binary) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_size, status.st_mtime_ns
