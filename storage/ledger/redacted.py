"""What redactions left: tables without what they held of some samples, and which ones those are."""

from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.decisions import redacted_files
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record

# What reading a run again can find wrong with it.


class Fault(StrEnum):
    """What can be wrong with a run."""

    UNREADABLE = "unreadable"
    """A manifest or commit is not what was written."""
    MISSING = "missing"
    """A committed file is gone."""
    ALTERED = "altered"
    """A committed file has other bytes."""
    UNREDACTED = "unredacted"
    """A redaction of a committed file is recorded and not done: it was interrupted."""
    INPUT_MISSING = "input_missing"
    """A commit was made from one that is gone."""
    INPUT_DIFFERS = "input_differs"
    """A commit was made from one that has another digest now."""
    TRAINED_TWICE = "trained_twice"
    """A group is trained on by the batches of two iterations, or twice by one."""
    GROUP_LOST = "group_lost"
    """A group was generated or left open, and the next batch says nothing of it."""
    GROUP_DIFFERS = "group_differs"
    """What a batch says of a group is not what the commits before it say."""
    CALLS_DIFFER = "calls_differ"
    """A sample's tokens are not those of its recorded calls."""
    ADMISSION_DIFFERS = "admission_differs"
    """An admission of a stream is missing, or not what was claimed."""


class Finding(Record):
    """One fault."""

    fault: Fault
    path: str
    """Store path of what is wrong."""
    message: str
    """One sentence with what was expected and found."""


MARK = "redacted"
"""Stands as the error of a row that was."""

_TEXTS = frozenset(
    {
        *("prompt_text", "response_text", "label", "metadata", "components", "error"),
        *("arguments", "arguments_digest", "result", "result_digest"),  # a short text can be guessed by its digest
    }
)
"""Columns that may hold text of a sample, or of its calls. So may every column of lists or records: tokens, or a value
for each."""


def without_text(table: pa.Table, rows: pa.Array) -> pa.Table:
    """The table with nothing in the given rows that is text of a sample, tokens, or one value for each token."""
    columns = []
    for column, kept in zip(table.schema, table.columns, strict=True):
        listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        nested = listed or pa.types.is_struct(column.type)
        if not nested and column.name not in _TEXTS:
            columns.append(kept)
            continue
        nothing = MARK if column.name == "error" else None if column.nullable else [] if listed else ""
        columns.append(pc.if_else(rows, pa.scalar(nothing, column.type), kept))
    return pa.table(columns, schema=table.schema)


def redacted_samples(ledger: Ledger) -> dict[str, int]:
    """The commits of a run, and of what it shares, that hold redacted training samples or are made from tokens of some:
    nothing can be done again from them. By name, each with the number of the decision."""
    found: dict[str, int] = {}
    owner: Ledger | None = ledger
    while owner is not None:
        for versions in redacted_files(owner.decisions.all()).values():
            decision, file = versions[-1]
            if file.step is not Step.EVAL and ledger.owner(file.iteration).run == owner.run:
                found[file.commit] = decision.number
        owner = owner.parent
    return found
