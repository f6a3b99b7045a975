"""The views of the ledger: their columns, types and meanings. `docs/views.md` and `cairn sql --schema` are these
files."""

from cairn.storage.query.views.commits import COSTS, RUNS, STEPS
from cairn.storage.query.views.evaluations import EVALS, EVALUATIONS
from cairn.storage.query.views.samples import ADVANTAGES, CALLS, GROUPS, REWARDS, SAMPLES, SEGMENTS, TOKENS
from cairn.storage.query.views.view import Column, Twin, View

__all__ = ["VIEWS", "Column", "Twin", "View"]

VIEWS: dict[str, View] = {
    view.name: view
    for view in (RUNS, STEPS, GROUPS, SAMPLES, SEGMENTS, CALLS, REWARDS, ADVANTAGES, TOKENS, EVALS, EVALUATIONS, COSTS)
}
"""All views, by name."""
