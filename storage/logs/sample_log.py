"""The log of samples: finished samples of a step or a stream, durable before a commit contains them.

A rollout shard, and an evaluation, writes one while it runs; a driver of a streaming run writes one from its start to
its end:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/000000.<sha256>.arrow
runs/<run>/stream/000003-5f0c…/write_ahead/000000.<sha256>.arrow
```
Samples of many groups share a part, and a group may be spread over several. In a stream a sample may have several rows,
one for each interruption and one for its end.

| a later attempt or driver finds | meaning |
|---|---|
| digest right, same inputs | its samples are recovered; generation resumes from those that did not end |
| digest right, other inputs or schema | made under another configuration: ignored |
| digest wrong | torn: ignored, its samples are generated again |
| a part that an earlier attempt wrote after a later one began | it never counts: `cairn.storage.logs.parts` |
| a sample that ended for the second time | the first end counts |

Parts are never committed: a commit names one compacted file.
"""

from collections import Counter
from collections.abc import Collection, Iterator

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import Status
from cairn.storage.ledger.snapshots import PARTS
from cairn.storage.logs.log import Log
from cairn.storage.logs.parts import Part, read_any_part
from cairn.storage.store.store import Store


class SampleLog(Log):
    """Log of the samples of a rollout shard, an evaluation, or a stream's driver."""

    contents = "finished samples"

    def recover(self) -> pa.Table:
        """Return the rows of other attempts with which samples ended, or from which they resume; one for each sample.

        Call it once, before anything is appended, and before the calls of the samples are read: the calls of a finished
        sample were made before it ended.
        """
        store, folder = self._attempt.store, self._attempt.attempts
        parts = [part for name in self._attempts() for part in _parts(store, folder, name)]
        tables = [self._schema.empty_table(), *(table for _, table in self._recovered(parts))]
        rows = pa.concat_tables(tables)
        return rows.take(pa.array(_counting(rows), pa.int64())).combine_chunks()

    def _part_name(self, number: int) -> str:
        return f"{PARTS}/{number:06d}"


def _counting(rows: pa.Table) -> list[int]:
    """Return the index of the row that counts for each sample, in order."""
    statuses = rows["status"].to_pylist() if "status" in rows.column_names else [None] * rows.num_rows
    counts: dict[tuple[int, int], int] = {}
    ended = set[tuple[int, int]]()
    for row, (sample, status) in enumerate(zip(_samples(rows), statuses, strict=True)):
        if sample in ended:
            continue
        counts[sample] = row
        if status != Status.ABORTED:
            ended.add(sample)
    return sorted(counts.values())


def _samples(table: pa.Table) -> list[tuple[int, int]]:
    """Return (group_id, sample_index) of every row."""
    return list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def _parts(store: Store, folder: str, attempt: str) -> list[Part]:
    """Return the parts of an attempt. The file names begin with the numbers of the parts."""
    below = f"{folder}/{attempt}/{PARTS}"
    names = [name for name in store.list(below) if name.endswith(".arrow")]
    numbers = [name.partition(".")[0] for name in names]
    return [
        Part(attempt, int(number) if number.isdecimal() else 0, f"{below}/{name}")
        for number, name in zip(numbers, names, strict=True)
    ]


def waiting_groups(store: Store, run: str, iteration: int, committed: Collection[str | None], size: int) -> int:
    """Return the number of finished groups of a rollout in parts of shards that are not in `committed`.

    A finished group has `size` samples.
    """
    samples = {
        (shard, group, sample)
        for shard, table in _waiting(store, run, iteration, committed)
        for group, sample in _samples(table)
    }
    finished = Counter((shard, group) for shard, group, _ in samples)
    return sum(count >= size for count in finished.values())


def waiting_prompts(store: Store, run: str, iteration: int, committed: Collection[str | None]) -> set[int]:
    """Return the prompts of samples in parts of shards that are not in `committed`, as rows of the data set."""
    return {row for _, table in _waiting(store, run, iteration, committed) for row in table["prompt_index"].to_pylist()}


def _waiting(
    store: Store, run: str, iteration: int, committed: Collection[str | None]
) -> Iterator[tuple[str | None, pa.Table]]:
    """Yield shard and rows of every part of a rollout's shards that are not in `committed`."""
    folder = layout.attempts(run, iteration, Step.ROLLOUT)
    for attempt in map(layout.parse_attempt, store.list(folder)):
        if attempt is None or (shard := layout.attempt_shard(attempt)) in committed:
            continue
        for part in _parts(store, folder, attempt):
            table = read_any_part(store, part.path)
            if table is not None:
                yield shard, table


def prompts_in_stream(store: Store, run: str) -> set[int]:
    """Return the prompts, as rows of the data set, of which samples are in the logs of a run's drivers."""
    folder = layout.stream(run)
    drivers = [name for name in map(layout.parse_attempt, store.list(folder)) if name is not None]
    tables = (read_any_part(store, part.path) for name in drivers for part in _parts(store, folder, name))
    return {row for table in tables if table is not None for row in table["prompt_index"].to_pylist()}


def stream_parts(store: Store, run: str) -> dict[str, int]:
    """Return store paths and sizes in bytes of the parts of all logs of a run's drivers, including those of calls."""
    sizes = store.find(layout.stream(run))
    return {path: size for path, size in sizes.items() if path.endswith(".arrow")}


def groups_of_part(store: Store, path: str) -> set[int]:
    """Return the groups with rows in a part of a log; empty if the part is torn or was deleted meanwhile."""
    table = read_any_part(store, path)
    return set() if table is None else set(table["group_id"].to_pylist())
