"""What the columns of a row hold: prompts, labels, metadata and tools, each of its own kind.

| column | is | is made of |
|---|---|---|
| prompt, response | text, or messages | JSON of messages |
| a message's content | text; parts of text and images where the model sees images | parts of text alone |
| a tool call's arguments | a mapping | JSON of one |
| label | text | a number; a whole one is written without a point |
| metadata | a mapping | JSON of one |
| tools | a list of mappings | JSON of one, or of each |

Anything else is refused with its row and column.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from cairn.configs.schema.data import RowFormat
from cairn.storage import canonical
from cairn.tasks.data.errors import BadData

Messages = list[dict[str, Any]]


def prompt_of(value: Any, key: str, format: RowFormat, where: str) -> str | Messages:
    """A string, or the messages of a chat, as column `key` holds them. Raises BadData."""
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


def label_of(value: Any, format: RowFormat, where: str, is_new: bool = True) -> str | None:
    """The text of a label, cut by `label_pattern`. Raises BadData; but not where it is of a wrong kind and `is_new` is
    false: it is then JSON."""
    assert format.label_key is not None
    if is_new or _is_text_or_number(value):
        label = label_text(value, format.label_key, where)
    else:
        label = json.dumps(value)
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
    """The text of the label in column `key`. Raises BadData."""
    if not _is_text_or_number(value):
        raise BadData(
            f"{where}: {key!r} is a label and holds {_shown(value)}, which is no text and no number: write it as text, "
            "or name another field"
        )
    if value is None or isinstance(value, str):
        return value
    return json.dumps(int(value) if isinstance(value, float) and value.is_integer() else value)


def metadata_of(value: Any, format: RowFormat, where: str) -> dict[str, Any] | None:
    """The mapping of a row's metadata. Raises BadData."""
    if isinstance(value, str):
        try:
            value = canonical.from_json(value)
        except ValueError as error:
            raise BadData(
                f"{where}: {format.metadata_key!r} is a string and no JSON object ({error}): correct the row or set "
                "metadata_key to null"
            ) from None
    if value is not None and not isinstance(value, dict):
        raise BadData(f"{where}: {format.metadata_key!r} is no mapping: correct the row or set metadata_key to null")
    return value


def tools_of(value: Any, format: RowFormat, where: str) -> list[Any] | None:
    """The tools of a row; a list, or the JSON of one. Raises BadData."""
    value = _read(value, list)
    tools = [_read(tool, dict) for tool in value] if isinstance(value, list) else value
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadData(f"{where}: {format.tool_key!r} is no list of tools: correct the row or set tool_key to null")
    return tools or None


def _messages_in(text: str) -> Any:
    """The messages that a column of strings holds as JSON; None where the text is a prompt itself."""
    if not text.lstrip().startswith("[") or '"role"' not in text:
        return None
    value = _read(text, list)
    return (
        value if isinstance(value, list) and value and all(isinstance(m, dict) and "role" in m for m in value) else None
    )


def _message(message: Mapping[str, Any], images: bool, where: str) -> dict[str, Any]:
    """A message without fields that are null. Raises BadData."""
    found = {name: value for name, value in message.items() if value is not None}
    if not isinstance(found["role"], str):
        raise BadData(f"{where} has the role {_shown(found['role'])}, which is no text: correct the row")
    if "content" in found:
        found["content"] = _content(found["content"], images, where)
    elif found["role"] != "assistant":
        raise BadData(f"{where} has no content: correct the row")
    if "tool_calls" in found:
        calls = _read(found["tool_calls"], list)
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadData(f"{where} has tool_calls that are no list of mappings: correct the row")
        found["tool_calls"] = [_call(call) for call in calls]
    return found


def _content(content: Any, images: bool, where: str) -> Any:
    """Text; with `images`, parts as they are. Raises BadData."""
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
    """A tool call with its arguments as a mapping, where they are one: templates write text in quotes once more."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    return {**call, "arguments": _read(call["arguments"], dict)} if "arguments" in call else dict(call)


def _read(value: Any, kind: type) -> Any:
    """What a text holds as JSON of a kind; else the value as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = canonical.from_json(value)
    except ValueError:
        return value
    return found if isinstance(found, kind) else value


def _is_text_or_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, str | int) and not isinstance(value, bool))


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _option(key: str, format: RowFormat) -> str:
    """The one that names a column."""
    return next(name for name, value in format if name.endswith("_key") and value == key)
