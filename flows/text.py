"""Escaping of untrusted text, such as names and samples, for Markdown and for terminals: it is shown and has no other
effect."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

# Text for terminals: stores, models and data sets may contain control characters, which would control a terminal.


_UNESCAPED = re.compile("[\x7f-\x9f]")
"""DEL and C1, which JSON allows unescaped in strings; a terminal may interpret C1 as escape sequences."""


def printable(text: str) -> str:
    """Return the text with its control characters (C0, DEL and C1) escaped; newlines and tabs stay."""
    return "".join(
        char if char in "\n\t" or ord(char) >= 160 or char.isprintable() else ascii(char)[1:-1] for char in text
    )


def printable_json(value: Any, ascii_only: bool = False) -> str:
    """Return the value, which may contain models, as indented JSON with all control characters escaped; its meaning
    does not change. With `ascii_only`, escape all other non-ASCII characters too."""
    text = json.dumps(value, indent=2, ensure_ascii=ascii_only, default=lambda model: model.model_dump(mode="json"))
    return _UNESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def number(value: float | None, form: str = "") -> str:
    """Return a number in a format of `format`; a dash for None."""
    return "–" if value is None else format(value, form)


def size(count: float) -> str:
    """Return a number of bytes in the largest binary unit that it fills: `7.49 GiB`."""
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    power = min(len(units) - 1, max(0, int(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:,.{2 if power else 0}f} {units[power]}"


def duration(seconds: float) -> str:
    """Return a duration in the unit that people would use: `0.35 s`, `42 s`, `27 min`, `5.2 h`, `4.4 days`."""
    for unit, length, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * length:
            amount = seconds / length
            return f"{amount:.{2 if amount < 1 else 1 if amount < 10 else 0}f} {unit}"
    return f"{seconds / 86400:,.1f} days"


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning and the number of characters that follow."""
    rest = len(text) - longest
    return text if rest <= 0 else f"{text[:longest]}… and {rest:,} characters more"


def percent(share: float | None) -> str:
    """Return a share, from 0 to 1, as percentage; a dash for None."""
    return "–" if share is None else f"{100 * share:.1f} %"


_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+.!|~>$:@/=-])")
_HTML = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}


def plain(text: object) -> str:
    """Return text that renders literally on one line: no Markdown, HTML or link in it takes effect."""
    line = " ".join(printable(str(text)).split())
    return "".join(_HTML.get(part, part) for part in re.split("([&<>])", _SPECIAL.sub(r"\\\1", line)))


def code(text: object) -> str:
    """Return text as inline code on one line; valid in table cells too."""
    line = " ".join(printable(str(text)).split()).replace("|", "\\|")
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if not line or line[0] == "`" or line[-1] == "`" else ""
    return f"{fence}{pad}{line}{pad}{fence}"


def block(text: str, longest: int) -> str:
    """Return text of several lines as a code block. Text beyond `longest` characters is left out, with a count."""
    rest = len(text) - longest
    shown = printable(text[:longest]) + (f"\n… and {rest:,} characters more" if rest > 0 else "")
    runs = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, runs + 1)
    return f"{fence}text\n{shown}\n{fence}"


def slug(name: str) -> str:
    """Return a name in the form of artifact keys: lower-case letters, digits and dashes; empty if it has none of
    them."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells must already be Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
