"""What redactions left: tables without what they held of some samples, and which ones those are."""

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.commits import Step
from cairn.storage.decisions import redacted_files
from cairn.storage.ledger import Ledger

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
