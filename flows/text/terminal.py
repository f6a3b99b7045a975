"""Text for terminals. What a store, a model or a data set holds may be control characters, which would steer one."""

import json
import re
from typing import Any

_LEFT_BY_JSON = re.compile("[\x7f-\x9f]")
"""DEL and C1, which JSON allows in its strings as they are; a terminal may take C1 for escape sequences."""


def printable(text: str) -> str:
    """The text with its control characters, C0, DEL and C1, spelled out; lines and tabs stay."""
    return "".join(
        char if char in "\n\t" or ord(char) >= 160 or char.isprintable() else ascii(char)[1:-1] for char in text
    )


def printable_json(value: Any, ascii_only: bool = False) -> str:
    """The value as indented JSON, which means the same with every control character in it spelled out; with
    `ascii_only` every other character beyond ASCII too."""
    text = json.dumps(value, indent=2, ensure_ascii=ascii_only)
    return _LEFT_BY_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
