"""The calls of a rollout's samples, as they were committed beside its table."""

from collections.abc import Collection
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cairn.storage.commits import Commit
from cairn.storage.layout import CALLS_FILE, RESULTS_FILE
from cairn.storage.schemas import CALLS, LONG_RESULTS, complete
from cairn.storage.snapshots import read_recorded_table
from cairn.storage.store import Store


def calls_of(store: Store, commit: Commit, groups: Collection[int]) -> list[dict[str, Any]]:
    """The calls of the samples of some groups, long results filled in, in the order in which each sample's were
    answered, those without an answer last; none where the rollout recorded none. Raises Damaged, Retired."""
    calls, results = (commit.beside(name) for name in (CALLS_FILE, RESULTS_FILE))
    if calls is None:
        return []
    table = complete(read_recorded_table(store, commit.run, calls), CALLS)
    few = table.filter(pc.is_in(table["group_id"], pa.array(sorted(groups), pa.int64())))
    rows = few.to_pylist()
    wanted = {row["result_digest"] for row in rows if row["result_digest"] is not None and row["result"] is None}
    if wanted and results is not None:
        table = read_recorded_table(store, commit.run, results)
        table = table.filter(pc.is_in(table["sha256"], pa.array(sorted(wanted), pa.string())))
        long = dict(zip(*(table[name].to_pylist() for name in LONG_RESULTS.names), strict=True))
        for row in rows:
            row["result"] = long.get(row["result_digest"], row["result"])
    return sorted(rows, key=lambda row: (row["order"] is None, row["order"] or 0))
