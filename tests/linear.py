"""Whether what reads text of a policy takes time that grows with its length and no faster."""

import signal
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from typing import Any

SIZE = 2**18
"""Characters of a text."""
SECONDS = 0.25
"""Of the CPU that it may take: a second for a megabyte."""


def shapes(pieces: Sequence[str], pairs: bool = False) -> Iterator[str]:
    """Texts that a policy writes that has collapsed: pieces of a grammar, each again and again; with `pairs` two of
    them in turn, one before many of another, and one behind."""
    for piece in pieces:
        yield _many(piece)
    if pairs:
        for one, other in permutations(pieces, 2):
            yield _many(one + other)
            yield one + _many(other)
            yield _many(one) + other


def too_slow(read: Callable[[str], Any], texts: Iterator[str]) -> list[str]:
    """How those texts begin and end that take too long."""

    def late(*_: Any) -> None:
        raise TimeoutError

    before, found = signal.signal(signal.SIGVTALRM, late), list[str]()
    try:
        for text in texts:
            try:
                signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
                read(text)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            except TimeoutError:
                found.append(f"{text[:60]} … {text[-30:]}")
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return found


def _many(piece: str) -> str:
    return piece * (SIZE // len(piece))
