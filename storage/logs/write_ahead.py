"""The write-ahead log: what a step finished, durable before the step is done.

A rollout shard, and an evaluation, keep one while they run:
```
runs/<run>/iterations/000042/rollout/00-000.000003-5f0c…/write_ahead/000000.<sha256>.arrow
```
A part is an Arrow IPC file of finished samples, a row each, written whole: samples of many groups share it, and a
group's may lie in several. Its name carries the SHA-256 of its bytes, its schema's metadata the digest of the inputs
that the rows were made from.

| a later attempt finds | meaning |
|---|---|
| digest right, same inputs | its samples are finished: taken over |
| digest right, other inputs or schema | made under another configuration: ignored |
| digest wrong | torn: ignored, its samples are generated again |
| written by an earlier attempt after a later one began | never counts: `cairn.storage.logs.parts` |
| a sample for the second time | the first counts |

Parts are never committed: the shard's commit names one compacted file, and then the parts are removed.
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
    """How many groups of a rollout, of `size` samples each, lie finished in write-ahead parts of shards other than
    those `committed`."""
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
    """The prompts, as rows of the data set, of which samples lie in write-ahead parts of shards other than those
    `committed`."""
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
    """Whether a store path is that of a part of a log of calls, see `cairn.storage.logs.call_log`."""
    return f"/{CALLS_FOLDER}/" in path and path.endswith(".arrow")


def groups_of_calls(store: Store, paths: Collection[str]) -> set[int]:
    """The groups of which there are calls in parts, by their store paths. Calls do not say of which prompt they are."""
    found = (read_any_part(store, path) for path in paths if is_calls(path))
    return {group for table in found if table is not None for group in table["group_id"].to_pylist()}


def _samples(table: pa.Table) -> list[tuple[int, int]]:
    """(group_id, sample_index) of every row."""
    return list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def parts_of(attempt: str, paths: Sequence[str]) -> list[Part]:
    """The parts of an attempt, whose names begin with their numbers."""
    numbers = [path.rpartition("/")[2].partition(".")[0] for path in paths]
    return [Part(attempt, int(n) if n.isdecimal() else 0, path) for n, path in zip(numbers, paths, strict=True)]


def _parts(store: Store, attempt: str) -> list[str]:
    """Store paths of the write-ahead parts in an attempt's folder."""
    folder = f"{attempt}/{PARTS}"
    return [f"{folder}/{name}" for name in store.list(folder) if name.endswith(".arrow")]


class WriteAhead(PacedWriter):
    """The write-ahead log of a rollout shard or an evaluation: samples are durable as soon as they finish. See the
    module for what a part is."""

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
        """`inputs_digest`: of everything the rows depend on; only parts made from the same inputs are taken over.
        `schema`: of the rows. `encode`: makes rows of what was appended, in the log's own thread; tables by default.
        `earlier_digests`: of the same inputs by the rules of earlier versions of the code. `deadline`: seconds that
        `close` may take."""
        self._attempt = attempt
        self._inputs_digest = inputs_digest
        self._accepted = {digest.encode() for digest in (inputs_digest, *earlier_digests)}
        self._schema = schema
        self._encode = encode
        self._written = [schema.empty_table()]
        self._numbers = count()
        super().__init__(self._write_samples, f"finished samples to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """The rows of everything that was appended. Returns when they are durable; then the log is closed."""
        self.close()
        return pa.concat_tables(self._written)

    def recover(self) -> pa.Table:
        """The rows that earlier attempts at this shard finished from the same inputs; perhaps none. To be called once,
        before anything is appended, and before the calls of its samples are read: what ended was called for before."""
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
