"""Pieces of Markdown that hold text of anybody's: whatever a name or a sample says is shown, and does nothing."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Text for terminals. What a store, a model or a data set holds may be control characters, which would steer one.


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


_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+.!|~>$:@/=-])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(text: object) -> str:
    """Text that renders as itself on one line: neither Markdown, nor HTML, nor a link."""
    line = " ".join(printable(str(text)).split())
    return "".join(_HTML.get(part, part) for part in re.split("([&<>])", _SPECIAL.sub(r"\\\1", line)))


def code(text: object) -> str:
    """Text as code on one line, in a table too."""
    line = " ".join(printable(str(text)).split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if not line or line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def block(text: str, longest: int) -> str:
    """Text of several lines as a code block; what goes beyond `longest` characters is counted and left out."""
    rest = len(text) - longest
    shown = printable(text[:longest]) + (f"\n… and {rest:,} characters more" if rest > 0 else "")
    runs = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, runs + 1)
    return f"{fence}text\n{shown}\n{fence}"


def slug(name: str) -> str:
    """A name as keys of artifacts may hold it: small letters, digits and dashes; empty if it has none of them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
