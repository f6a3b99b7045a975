"""Printing for people and for machines."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cairn.flows.text import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from cairn.flows.events import Event


def print_stderr(text: str) -> None:
    """Print to stderr."""
    print(printable(text), file=sys.stderr)


def print_warning(sentence: str) -> None:
    """Print a sentence on what does not stop the command to stderr."""
    print_stderr(f"warning: {sentence}")


def print_message(event: "Event") -> None:
    """Print the text of an event to stderr, if it is a message."""
    from cairn.tasks.durable.events import Message

    if isinstance(event, Message):
        print_stderr(event.text)


def say(text: str) -> None:
    """Print to stdout."""
    print(printable(text))


def print_parts(parts: "Iterable[RenderableType]") -> None:
    """Print texts and tables to stdout. The terminal folds texts, also those with styles; Rich folds the rest."""
    out = None
    for part in parts:
        if isinstance(part, str):
            say(part)
        else:
            from rich.text import Text

            out = out or console()
            out.print(part, soft_wrap=isinstance(part, Text))


def console() -> "Console":
    """Return a console for the terminal, or for the file or pipe in its place."""
    from rich.console import Console

    terminal = Console(highlight=False)
    # A file or a pipe has no width at which lines should be folded.
    return terminal if terminal.is_terminal else Console(highlight=False, width=200)


def print_json(value: Any) -> None:
    """Print to stdout as indented JSON."""
    text = printable_json(value)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = printable_json(value, ascii_only=True)
    print(text)
