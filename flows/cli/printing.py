"""Printing for people and for machines."""

import sys
from typing import Any

from cairn.flows.text import printable, printable_json


def tell(text: str) -> None:
    """Print to stderr."""
    print(printable(text), file=sys.stderr)


def say(text: str) -> None:
    """Print to stdout."""
    print(printable(text))


def print_json(value: Any) -> None:
    """Print to stdout as indented JSON."""
    text = printable_json(value)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = printable_json(value, ascii_only=True)
    print(text)
