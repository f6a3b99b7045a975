"""The commonest error of samples that have no reward."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import pyarrow as pa

from cairn.engines.types.places import split_place
from cairn.storage.ledger.schemas import Status
from cairn.storage.records import Record

COLUMNS = ["status", "error"]
"""Columns of a table of rewards that `common_error` reads."""

_OF_ITS_GROUP = "a sample of its group failed: "
_LOST = ("generate: UncertainEffect", "EngineTimeout")
"""Prefixes of errors that result from the loss of a process or an engine."""


class CommonError(Record):
    """The commonest error of several samples, shards or tries."""

    error: str
    """Its first line, as of one of them."""
    place: str | None = None
    """Innermost place in user code, `file.py:line`."""
    count: int
    """How many have it. Errors of one type at one place are one error, whatever their messages say."""
    failed: int
    """How many have failed, with any error."""
    total: int
    """How many there are."""
    unit: str = "samples"

    @property
    def will_recur(self) -> bool:
        """Whether all failed, and code did it. The loss of a process need not recur."""
        return self.failed == self.total and not self.error.startswith(_LOST)

    def __str__(self) -> str:
        place = "" if self.place is None else f" ({self.place})"
        return f"{self.failed} of {self.total} {self.unit} failed, {self.count} of them with: {self.error}{place}"


def common_error(tables: Iterable[pa.Table]) -> CommonError | None:
    """Return the commonest error in tables of rewards with `COLUMNS`; None where no sample failed."""
    return commonest(
        row for table in tables for row in zip(*(table.column(n).to_pylist() for n in COLUMNS), strict=True)
    )


def commonest(samples: Iterable[tuple[str | None, str | None]]) -> CommonError | None:
    """Return the commonest error of samples, each a status and an error; None where none failed."""
    total, alike = 0, defaultdict[tuple[str, str | None], Counter[str]](Counter)
    for status, text in samples:
        total += 1
        if status == Status.FAILED:
            message, place = split_place((text or "no reason is recorded").removeprefix(_OF_ITS_GROUP))
            error = message.partition("\n")[0]
            alike[error if place is None else _kind(error), place][error] += 1
    if not alike:
        return None
    (_, place), errors = max(alike.items(), key=lambda item: item[1].total())
    failed = sum(counts.total() for counts in alike.values())
    error = errors.most_common(1)[0][0]
    return CommonError(error=error, place=place, count=errors.total(), failed=failed, total=total)


def _kind(error: str) -> str:
    """Return the type of an error, such as `generate: KeyError`."""
    return ": ".join(error.split(": ")[: 2 if error.startswith("generate: ") else 1])
