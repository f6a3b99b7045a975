"""How a query fails."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# What can go wrong with a run's files, told apart by what helps.


class StoreError(Exception):
    """The store did not answer, or not rightly; a new try may help."""


class StoreRefused(StoreError):
    """The store will not do this however often it is asked: credentials, bucket, permissions, space. The message says
    what to change."""


class LeadsOut(StoreRefused):
    """A symbolic link in the store leads out of it."""


class NoSpace(StoreRefused):
    """No space is left, in the store or in another place that the message names: a machine's disk or shared memory. A
    new try helps when somebody has freed some."""


class Damaged(Exception):
    """A committed piece is missing, torn or altered. The message names it with what was expected and found."""


class Retired(Exception):
    """A committed file was removed on purpose: the run's configuration does not keep it for ever. The message names
    it."""


class Redacted(Retired):
    """Samples that would be needed were redacted: a person has had their text and tokens taken out of the run. The
    message names them."""


class BeingDeleted(Exception):
    """Someone has begun to delete the run; nothing of it may be used any more. The message says how to finish."""


class SharedWithForks(Exception):
    """Other runs were forked from the run and read it. The message names them."""


class StaleCommits(Exception):
    """Committed steps whose inputs or configuration are no longer those they were made from."""

    def __init__(self, commits: list[tuple[int, str, str | None, str]]):
        """`commits`: (iteration, step, shard or None, why) of every stale step."""
        self.commits = commits
        names = [
            f"{iteration:06d}/{step}{f'.{shard}' if shard else ''}: {why}" for iteration, step, shard, why in commits
        ]
        super().__init__(
            f"{len(commits)} committed steps no longer match what they were made from: {'; '.join(names)}. "
            "Undo the change, or fork the run before the first of them"
        )


class LeaseHeld(Exception):
    """A live driver owns the run."""

    def __init__(self, message: str, holder: Any):
        """`holder`: the `cairn.storage.ledger.leases.Holder` that owns the run."""
        self.holder = holder
        super().__init__(message)


class LeaseLost(Exception):
    """This driver does not own the run (any more) and must stop without committing anything."""


class RunDiffers(Exception):
    """A run of this name exists with another configuration."""

    def __init__(self, run: str, differences: list[tuple[str, Any, Any]]):
        """`differences`: (dotted field, value in the ledger, value given) of every differing field."""
        self.differences = differences
        self.stale: list[tuple[int, str, str | None, str]] = []
        """Committed steps that do not match what was given, as in StaleCommits, where somebody has looked for them."""
        fields = "; ".join(
            f"{field} is {recorded!r} in the ledger, {given!r} now" for field, recorded, given in differences
        )
        super().__init__(
            f"run {run!r} exists with another configuration: {fields}. Give the new run another name, or use the "
            "recorded values"
        )


# Places that are full: whoever finds no space left in one names it.


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


class BadQuery(Exception):
    """The text asks for what is not there, or for more than reading the ledger. The message says what and where."""
