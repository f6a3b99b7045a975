"""Errors of stores, ledgers and queries."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cairn.configs.errors import BadInput, Failure

# Errors of a run's files, distinguished by what resolves them.


class StoreError(Failure):
    """The store did not respond, or not correctly. A retry may help."""


class StoreRefused(StoreError, BadInput):
    """The store refuses the request permanently: credentials, bucket, permissions, space.

    The message says what to change.
    """


class LinkOutsideStore(StoreRefused):
    """A symbolic link in the store points out of it."""


class NoSpace(StoreRefused):
    """No space is left in the store, or in another place that the message names: a disk or shared memory.

    A retry helps once a person has freed some.
    """


class Damaged(Failure):
    """A committed file is missing, torn or altered. The message names it with what was expected and found."""


class Retired(Failure):
    """A committed file was removed by the run's retention policy. The message names it."""


class Redacted(Retired):
    """Required samples were redacted: a person had their text and tokens removed from the run. The message names
    them."""


class BeingDeleted(BadInput):
    """The run is being deleted and must not be used. The message says how to finish the deletion."""


class SharedWithForks(BadInput):
    """Other runs were forked from this run and read it. The message names them."""


class StaleCommits(Failure):
    """Some committed steps were made from inputs or a configuration that have changed since."""

    def __init__(self, commits: list[tuple[int, str, str | None, str]]):
        """`commits` are (iteration, step, shard or None, reason) of every stale step."""
        self.commits = commits
        names = [
            f"{iteration:06d}/{step}{f'.{shard}' if shard else ''}: {why}" for iteration, step, shard, why in commits
        ]
        super().__init__(
            f"{len(commits)} committed steps no longer match what they were made from: {'; '.join(names)}. "
            "Undo the change, or fork the run before the first of them"
        )


class LeaseHeld(BadInput):
    """A live driver owns the run."""

    def __init__(self, message: str, holder: Any):
        """`holder` is the `cairn.storage.ledger.leases.Holder` that owns the run."""
        self.holder = holder
        super().__init__(message)


class LeaseLost(Failure):
    """This driver does not own the run (any more) and must stop without a commit."""


class RunDiffers(BadInput):
    """A run of this name exists with another configuration."""

    def __init__(self, run: str, differences: list[tuple[str, Any, Any]]):
        """`differences` are (dotted field, value in the ledger, current value) of every differing field."""
        self.differences = differences
        self.stale: list[tuple[int, str, str | None, str]] = []
        """Committed steps that do not match the current values, as in StaleCommits, if a caller has determined them."""
        fields = "; ".join(
            f"{field} is {recorded!r} in the ledger, {current!r} now" for field, recorded, current in differences
        )
        super().__init__(
            f"run {run!r} exists with another configuration: {fields}. Give the new run another name, or use the "
            "recorded values"
        )


# Full disks: code that runs out of space names the place.


NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""`errno` values of a full file system and of an exhausted quota."""


def lacks_space(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes says that no space is left.

    It checks `errno`, and the message for libraries that call the system themselves.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(os.strerror(number) in str(error) for number in NO_SPACE):
            return True
        error = error.__cause__ or error.__context__
    return False


def named(error: Exception, place: Path | str) -> Exception:
    """Return NoSpace with the name of the place if an error says that the place is full; otherwise return the error."""
    if isinstance(error, NoSpace) or not lacks_space(error):  # it already names its place
        return error
    return NoSpace(f"cannot write to {place}: no space is left there; free some")


@contextmanager
def naming_full(place: Path | str) -> Iterator[None]:
    """Raise NoSpace, naming the place, if the block runs out of space there."""
    try:
        yield
    except Exception as error:
        named_error = named(error, place)
        if named_error is error:
            raise
        raise named_error from error


@contextmanager
def naming_damaged(file: str, way_out: str = "") -> Iterator[None]:
    """Raise Damaged, naming the file, if the block finds that it is not what was written: raises ValueError."""
    try:
        yield
    except ValueError as error:
        raise Damaged(f"{file} cannot be trusted: {error}{way_out and f'; {way_out}'}") from None


class BadQuery(Exception):
    """The query names something that does not exist, or tries more than reading the ledger.

    The message says what and where.
    """
