"""Places that are full: whoever finds no space left in one names it."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cairn.storage.errors import NoSpace

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""The system's numbers of a full file system and of a quota that is used up."""


def lacks_space(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that no space was left: by its number or, as libraries have it
    that ask the system themselves, in the system's words."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(os.strerror(number) in str(error) for number in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


def named(error: Exception, place: Path | str) -> Exception:
    """NoSpace with the name of the place where an error says that it is full; any other error as it is."""
    if isinstance(error, NoSpace) or not lacks_space(error):  # it names its own
        return error
    return NoSpace(f"cannot write to {place}: no space is left there; free some")


@contextmanager
def naming_full(place: Path | str) -> Iterator[None]:
    """Raise NoSpace, with the name of the place, where the block finds no space left there."""
    try:
        yield
    except Exception as error:
        found = named(error, place)
        if found is error:
            raise
        raise found from error
