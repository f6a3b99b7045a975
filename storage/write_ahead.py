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
| a sample for the second time | the first counts |

Parts are never committed: the shard's commit names one compacted file, and then the parts are removed.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa

from cairn.storage import layout, tables
from cairn.storage.commits import Step
from cairn.storage.errors import Damaged
from cairn.storage.paced import PacedWriter
from cairn.storage.schemas import ROLLOUT, complete
from cairn.storage.snapshots import PARTS, AttemptFolder
from cairn.storage.store import Store

_INPUTS_KEY = b"inputs_digest"
CALLS_FOLDER = f"{PARTS}/calls"
READERS = 8
"""Parts read at a time: an object store answers one after tens of milliseconds."""


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
    """Whether a store path is that of a part of a log of calls, see `cairn.storage.call_log`."""
    return f"/{CALLS_FOLDER}/" in path and path.endswith(".arrow")


def groups_of_calls(store: Store, paths: Collection[str]) -> set[int]:
    """The groups of which there are calls in parts, by their store paths. Calls do not say of which prompt they are."""
    found = (read_any_part(store, path) for path in paths if is_calls(path))
    return {group for table in found if table is not None for group in table["group_id"].to_pylist()}


def _samples(table: pa.Table) -> list[tuple[int, int]]:
    """(group_id, sample_index) of every row."""
    return list(zip(table["group_id"].to_pylist(), table["sample_index"].to_pylist(), strict=True))


def _parts(store: Store, attempt: str) -> list[str]:
    """Store paths of the write-ahead parts in an attempt's folder."""
    folder = f"{attempt}/{PARTS}"
    return [f"{folder}/{name}" for name in store.list(folder) if name.endswith(".arrow")]


def read_any_part(store: Store, path: str) -> pa.Table | None:
    """The rows of a part with its schema's metadata; None if it is torn, or has gone with its shard's commit."""
    try:
        data = store.read(path)
    except FileNotFoundError:
        return None
    if not path.endswith(f".{hashlib.sha256(data).hexdigest()}.arrow"):
        return None
    try:
        return tables.from_ipc(data)
    except ValueError as error:
        raise Damaged(f"{path} is not what Cairn writes: {error}") from error


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
        super().__init__(self._write_samples, f"finished samples to {attempt.folder}", deadline)

    def appended(self) -> pa.Table:
        """The rows of everything that was appended. Returns when they are durable; then the log is closed."""
        self.close()
        return pa.concat_tables(self._written)

    def recover(self) -> pa.Table:
        """The rows that earlier attempts at this shard finished from the same inputs; perhaps none."""
        attempt = self._attempt
        folder = attempt.beside
        paths = []
        for name in map(layout.parse_attempt, attempt.store.list(folder)):
            if name is not None and name != attempt.name and layout.attempt_shard(name) == attempt.shard:
                paths += _parts(attempt.store, f"{folder}/{name}")
        found = [self._schema.empty_table()]
        seen: set[tuple[int, int]] = set()
        with ThreadPoolExecutor(READERS) as readers:
            read = readers.map(lambda path: read_part(attempt.store, path, self._schema, self._accepted), paths)
            for path, table in zip(paths, read, strict=True):
                if table is None:
                    continue
                attempt.superseded.append(path)
                samples = _samples(table)
                found.append(table.filter(pa.array([sample not in seen for sample in samples], pa.bool_())))
                seen.update(samples)
        return pa.concat_tables(found).combine_chunks()

    def _write_samples(self, number: int, samples: list[Any]) -> None:
        table = self._encode(samples)
        self._write_part(number, table)
        self._written.append(table)

    def _write_part(self, number: int, table: pa.Table) -> None:
        sha256, data = part_bytes(table, self._inputs_digest)
        path = self._attempt.path(f"{PARTS}/{number:06d}.{sha256}.arrow")
        self._attempt.store.write(path, data)
        self._attempt.superseded.append(path)


def part_bytes(table: pa.Table, inputs_digest: str) -> tuple[str, bytes]:
    """A part of a log, with the digest of what its rows were made from: its SHA-256 and its bytes."""
    sink = pa.BufferOutputStream()
    table = table.replace_schema_metadata({_INPUTS_KEY: inputs_digest})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    data = sink.getvalue().to_pybytes()
    return hashlib.sha256(data).hexdigest(), data


def read_part(store: Store, path: str, schema: pa.Schema, accepted: Collection[bytes]) -> pa.Table | None:
    """The rows of a part, with the columns that the schema has got since; None where it is torn, is gone, or was made
    from other inputs than those of the digests that are accepted."""
    table = read_any_part(store, path)
    if table is None:
        return None
    metadata = table.schema.metadata or {}
    table = complete(table.replace_schema_metadata(None), schema)
    return table if metadata.get(_INPUTS_KEY) in accepted and table.schema.equals(schema) else None
