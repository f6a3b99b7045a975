"""The write-ahead log: finished samples of a step, durable before the step is done.

A rollout shard, and an evaluation, writes one while it runs:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/000000.<sha256>.arrow
```
A part is an Arrow IPC file of finished samples, one row each, written whole. Samples of many groups share a part, and a
group may be spread over several. The name of a part carries the SHA-256 of its bytes, the metadata of its schema the
digest of the inputs from which the rows were made.

| a later attempt finds | meaning |
|---|---|
| digest right, same inputs | its samples are finished: recovered |
| digest right, other inputs or schema | made under another configuration: ignored |
| digest wrong | torn: ignored, its samples are generated again |
| a part that an earlier attempt wrote after a later one began | it never counts: `cairn.storage.logs.parts` |
| a sample for the second time | the first counts |

Parts are never committed. The shard's commit names one compacted file, and then the parts are deleted.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain, count
from typing import Any

import pyarrow as pa

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.schemas import ROLLOUT
from cairn.storage.ledger.snapshots import PARTS, AttemptFolder
from cairn.storage.logs.parts import PacedWriter, Part, part_bytes, read_any_part, recover, says
from cairn.storage.store.store import Store

CALLS_FOLDER = f"{PARTS}/calls"


def waiting_groups(store: Store, run: str, iteration: int, committed: Collection[str | None], size: int) -> int:
    """Return the number of finished groups of a rollout in write-ahead parts of shards that are not in `committed`.

    A finished group has `size` samples.
    """
    folder = layout.attempts(run, iteration, Step.ROLLOUT)
    found: set[tuple[str | None, int, int]] = set()
    for attempt in map(layout.parse_attempt, store.list(folder)):
        if attempt is None or (shard := layout.attempt_shard(attempt)) in committed:
            continue
        for path in _parts(store, f"{folder}/{attempt}"):
            table = read_any_part(store, path)
            if table is not None:
                found |= {(shard, group, sample) for group, sample in _samples(table)}
    finished = Counter((shard, group) for shard, group, _ in found)
    return sum(count >= size for count in finished.values())


def waiting_prompts(store: Store, run: str, iteration: int, committed: Collection[str | None]) -> set[int]:
    """Return the prompts of samples in write-ahead parts of shards that are not in `committed`, as rows of the data
    set."""
    folder = layout.attempts(run, iteration, Step.ROLLOUT)
    found: set[int] = set()
    for attempt in map(layout.parse_attempt, store.list(folder)):
        if attempt is None or layout.attempt_shard(attempt) in committed:
            continue
        for path in _parts(store, f"{folder}/{attempt}"):
            table = read_any_part(store, path)
            if table is not None:
                found |= set(table["prompt_index"].to_pylist())
    return found


def is_calls(path: str) -> bool:
    """Return whether a store path is that of a part of a log of calls (`cairn.storage.logs.call_log`)."""
    return f"/{CALLS_FOLDER}/" in path and path.endswith(".arrow")


def groups_of_calls(store: Store, paths: Collection[str]) -> set[int]:
    """Return the groups with calls in parts, from the parts' store paths. Calls do not record their prompt."""
    found = (read_any_part(store, path) for path in paths if is_calls(path))
    return {group for table in found if table is not None for group in table["group_id"].to_pylist()}


def _samples(table: pa.Table) -> list[tuple[int, int]]:
    """Return (group_id, sample_index) of every row."""
    return list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def parts_of(attempt: str, paths: Sequence[str]) -> list[Part]:
    """Return the parts of an attempt from their store paths. The file names begin with the numbers of the parts."""
    numbers = [path.rpartition("/")[2].partition(".")[0] for path in paths]
    return [Part(attempt, int(n) if n.isdecimal() else 0, path) for n, path in zip(numbers, paths, strict=True)]


def _parts(store: Store, attempt: str) -> list[str]:
    """Return the store paths of the write-ahead parts in an attempt's folder."""
    folder = f"{attempt}/{PARTS}"
    return [f"{folder}/{name}" for name in store.list(folder) if name.endswith(".arrow")]


class WriteAhead(PacedWriter):
    """Write-ahead log of a rollout shard or an evaluation: samples are durable soon after they finish."""

    def __init__(
        self,
        attempt: AttemptFolder,
        inputs_digest: str,
        *,
        schema: pa.Schema = ROLLOUT,
        encode: Callable[[list[Any]], pa.Table] = pa.concat_tables,
        earlier_digests: Collection[str] = (),
        deadline: float = 120.0,
    ):
        """Begin the log.

        Args:
            attempt: folder of the attempt.
            inputs_digest: digest of everything that the rows depend on; only parts made from the same inputs are
                recovered.
            schema: schema of the rows.
            encode: converts appended items to rows, in the log's own thread; by default the items are tables.
            earlier_digests: digests of the same inputs by the rules of earlier versions of the code.
            deadline: greatest number of seconds for `close`.
        """
        self._attempt = attempt
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._schema = schema
        self._encode = encode
        self._written = [schema.empty_table()]
        self._numbers = count()
        super().__init__(self._write_samples, f"finished samples to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """Close the log and return the rows of everything that was appended, once they are durable."""
        self.close()
        return pa.concat_tables(self._written)

    def recover(self) -> pa.Table:
        """Return the rows that earlier attempts at this shard finished from the same inputs; the table may be empty.

        Call it once, before anything is appended, and before the calls of the samples are read: the calls of a finished
        sample were made before it ended.
        """
        attempt = self._attempt
        folder = attempt.beside
        names = map(layout.parse_attempt, attempt.store.list(folder))
        others = [
            name
            for name in names
            if name is not None and name != attempt.name and layout.attempt_shard(name) == attempt.shard
        ]
        parts = [parts_of(name, _parts(attempt.store, f"{folder}/{name}")) for name in others]
        recovered = recover(attempt.store, [*chain.from_iterable(parts)], self._schema, self._accepted)
        if (found := says(recovered, attempt.name)) is not None:
            self._write_part(self._schema.empty_table(), found)
        rows = [self._schema.empty_table()]
        seen: set[tuple[int, int]] = set()
        for part, table in recovered.tables:
            if table is None:
                continue
            attempt.superseded.append(part.path)
            samples = _samples(table)
            rows.append(table.filter(pa.array([sample not in seen for sample in samples], pa.bool_())))
            seen.update(samples)
        return pa.concat_tables(rows).combine_chunks()

    def _write_samples(self, number: int, samples: list[Any]) -> None:
        table = self._encode(samples)
        self._write_part(table)
        self._written.append(table)

    def _write_part(self, table: pa.Table, metadata: Mapping[bytes, bytes] | None = None) -> None:
        sha256, data = part_bytes(table, self._inputs_digest, metadata)
        path = self._attempt.path(f"{PARTS}/{next(self._numbers):06d}.{sha256}.arrow")
        self._attempt.store.write(path, data)
        self._attempt.superseded.append(path)
