"""Redacted samples: how a table is emptied of a sample's text, and which commits hold redacted samples. Also the faults
that a check of a run can find."""

from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.decisions import redacted_files
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.records import Record

# Faults that a check of a run can find.


class Fault(StrEnum):
    """Kind of fault in a run."""

    UNREADABLE = "unreadable"
    """A manifest or commit differs from what was written."""
    MISSING = "missing"
    """A committed file is gone."""
    ALTERED = "altered"
    """A committed file has other bytes."""
    UNREDACTED = "unredacted"
    """The redaction of a committed file is recorded but not done: it was interrupted."""
    INPUT_MISSING = "input_missing"
    """A commit was made from a commit that is gone."""
    INPUT_DIFFERS = "input_differs"
    """A commit was made from a commit that has another digest now."""
    TRAINED_TWICE = "trained_twice"
    """Two iterations trained on the same group, or one iteration trained on it twice."""
    GROUP_LOST = "group_lost"
    """A group was generated or left open, and the next batch does not mention it."""
    GROUP_DIFFERS = "group_differs"
    """A batch's record of a group contradicts the commits before it."""
    CALLS_DIFFER = "calls_differ"
    """A sample's tokens do not match its recorded calls."""
    ADMISSION_DIFFERS = "admission_differs"
    """An admission of a stream is missing, or differs from its claim."""


class Finding(Record):
    """A fault that a check found."""

    fault: Fault
    path: str
    """Store path of the faulty file."""
    message: str
    """Sentence with what was expected and what was found."""


def commit_finding(commit: Commit, fault: Fault, message: str) -> Finding:
    """Return a finding about a commit. Its path is that of the file that holds the commit."""
    return Finding(fault=fault, path=commit.path, message=message)


REDACTED_ERROR = "redacted"
"""Value of `error` in a redacted row."""

_TEXTS = frozenset(
    {
        *("prompt_text", "response_text", "label", "metadata", "components", "error"),
        *("arguments", "arguments_digest", "result", "result_digest"),  # a short text can be guessed by its digest
    }
)
"""Columns that may hold text of a sample or of its calls. Every column of lists or structs may hold some, too: tokens,
or one value for each token."""


def redact_rows(table: pa.Table, rows: pa.Array) -> pa.Table:
    """Return the table with the text, tokens and per-token values of the rows `rows` removed."""
    columns = []
    for column, values in zip(table.schema, table.columns, strict=True):
        listed = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        nested = listed or pa.types.is_struct(column.type)
        if not nested and column.name not in _TEXTS:
            columns.append(values)
            continue
        nothing = REDACTED_ERROR if column.name == "error" else None if column.nullable else [] if listed else ""
        columns.append(pc.if_else(rows, pa.scalar(nothing, column.type), values))
    return pa.table(columns, schema=table.schema)


def redacted_samples(ledger: Ledger) -> dict[str, int]:
    """Return the commits of a run, and of what it shares, whose tables were redacted, other than those of evaluations.

    Nothing can be recomputed from them. The result maps the name of a commit to the number of the decision.
    """
    numbers: dict[str, int] = {}
    owner: Ledger | None = ledger
    while owner is not None:
        for versions in redacted_files(owner.decisions.all()).values():
            decision, file = versions[-1]
            if file.step is not Step.EVAL and ledger.owner(file.iteration).run == owner.run:
                numbers[file.commit] = decision.number
        owner = owner.parent
    return numbers
