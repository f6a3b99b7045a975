"""Pieces of Markdown that hold text of anybody's: whatever a name or a sample says is shown, and does nothing."""

import re
from collections.abc import Iterable, Sequence

from cairn.flows.text.terminal import printable

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
