"""Snapshot files and the write-ahead log, on every kind of store."""

import hashlib
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, ROLLOUT, SUPPORT
from cairn.storage.ledger.snapshots import Attempt, read_table, to_parquet
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from cairn.storage.store.errors import Damaged, StoreError
from cairn.storage.store.store import Store, StoredFile
from tests.storage.builders import CONFIG, commit_step, rollout_table
from tests.waiting import wait_for

pytestmark = pytest.mark.contract


@pytest.fixture
def ledger(store: Store) -> Ledger:
    ledger = Ledger.create(store, "run-1", CONFIG)
    ledger.acquire()
    return ledger


def _attempt(ledger: Ledger, shard: str | None = "00-000") -> Attempt:
    return ledger.attempt(0, Step.ROLLOUT, shard)


def _parts(ledger: Ledger) -> list[str]:
    return [path for path in ledger.store.find(layout.iterations(ledger.run)) if path.endswith(".arrow")]


def _groups(table: pa.Table) -> list[int]:
    return sorted(set(table["group_id"].to_pylist()))


def test_an_altered_or_missing_table_is_damage_with_expected_and_found(ledger: Ledger) -> None:
    output = _attempt(ledger).write_table("samples.parquet", rollout_table([1, 2]))
    path = layout.in_run(ledger.run, output.path)
    assert read_table(ledger.store, ledger.run, output, ["seed", "group_id"]).column_names == ["seed", "group_id"]
    data = ledger.store.read(path)
    assert output.sha256 == hashlib.sha256(data).hexdigest()
    altered = data[:100] + bytes([data[100] ^ 1]) + data[101:]
    for changed in (altered, data[:-1]):
        ledger.store.write(path, changed)
        found = hashlib.sha256(changed).hexdigest()
        with pytest.raises(Damaged, match=f"{re.escape(path)} .*{output.sha256}, found {len(changed)} .*{found}"):
            read_table(ledger.store, ledger.run, output, ["group_id"])
    ledger.store.delete(path)
    with pytest.raises(Damaged, match=f"{re.escape(path)} is committed but missing"):
        read_table(ledger.store, ledger.run, output)


def test_a_file_that_an_engine_wrote_is_adopted_as_it_says(ledger: Ledger) -> None:
    attempt = _attempt(ledger)
    written = StoredFile(f"{attempt.folder}/by-engine/rank-0", 7, hashlib.sha256(b"weights").hexdigest())
    ledger.store.write(written.path, b"weights")
    adopted = attempt.adopt(written)
    assert (adopted.bytes, adopted.sha256) == (written.bytes, written.sha256)
    assert ledger.store.read(layout.in_run(ledger.run, adopted.path)) == b"weights"


def test_equal_tables_have_equal_bytes() -> None:
    table = rollout_table([1, 2, 3], tokens=40)
    in_pieces = pa.concat_tables([table.slice(0, 1), table.slice(1)]).replace_schema_metadata({"made": "elsewhere"})
    assert to_parquet(in_pieces) == to_parquet(table)


def test_the_digest_of_a_table_s_content_covers_everything_but_measurements(ledger: Ledger) -> None:
    table = rollout_table([1, 2], tokens=40)

    def changed(name: str, rows: list[Any]) -> pa.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, table.schema.field(place), pa.array(rows, table.schema.field(place).type))

    def content(table: pa.Table) -> str | None:
        return _attempt(ledger).write_table("samples.parquet", table).content

    rows = {name: table[name].to_pylist() for name in table.column_names}
    expected = content(table)
    assert expected is not None
    assert content(table.select(["group_id", "seed"])) is None
    for name, own in (("engine", "another"), ("seconds", 9.0), ("cached_tokens", 9)):
        assert content(changed(name, [own, *rows[name][1:]])) == expected
    for name, own in (("group_id", 9), ("response_ids", [9] * 40), ("label", "another"), ("metadata", "{}")):
        assert content(changed(name, [own, *rows[name][1:]])) != expected
    assert content(table.rename_columns([name.replace("label", "answer") for name in table.column_names])) != expected
    assert content(table.slice(1)) != expected


def test_a_table_is_read_by_another_implementation_of_parquet(tmp_path: Path) -> None:
    rows = [
        {"ids": [1, -2, 151_000], "kept": [[7, 9], []], "log_probs": [-0.5, 0.0, -3.25], "text": "a"},
        {"ids": [], "kept": None, "log_probs": [], "text": None},
    ]
    types = {
        "ids": pa.list_(pa.int32()),
        "kept": SUPPORT.type,
        "log_probs": pa.list_(pa.float32()),
        "text": pa.string(),
    }
    (tmp_path / "rows.parquet").write_bytes(to_parquet(pa.Table.from_pylist(rows, pa.schema(types))))
    found = duckdb.sql(f"SELECT * FROM '{tmp_path}/rows.parquet'").fetchall()
    assert found == [tuple(row.values()) for row in rows]


def test_a_snapshot_costs_at_most_seven_bytes_a_token() -> None:
    samples, tokens = 2048, 512
    rollouts = rollout_table(list(range(samples // 8)), samples=8, tokens=tokens)
    # Independent tokens whose frequencies fall off like those of words (Zipf), and a text of one word a token.
    ids = np.random.default_rng(0).zipf(1.3, (samples, tokens)).clip(0, 151_000).astype(np.int32)
    words = np.asarray(
        re.findall(r"\w+", "the sum is so we get an answer therefore let x be 12 or 7 find each cost total")
    )
    text = [" ".join(row) for row in words[ids % len(words)]]
    for name, values in (("response_text", text), ("response_ids", list(ids))):
        field = ROLLOUT.field(name)
        rollouts = rollouts.set_column(ROLLOUT.get_field_index(name), field, pa.array(values, field.type))
    constant = [[(n % 7) / 3] * tokens for n in range(samples)]
    advantages = pa.table(
        {
            "group_id": rollouts["group_id"],
            "sample_index": rollouts["sample_index"],
            "reward": [1.0] * samples,
            "advantages": constant,
            "returns": constant,
            "ages": [[0] * tokens for _ in range(samples)],
        },
        ADVANTAGE,
    )
    assert len(to_parquet(rollouts)) + len(to_parquet(advantages)) <= 7 * samples * tokens
    assert len(to_parquet(advantages)) <= 0.1 * samples * tokens
    free = rollouts.select(["loss_mask", "weight_versions"])
    assert len(to_parquet(free)) <= 0.01 * samples * tokens


@pytest.mark.parametrize("tokens", [100, 2_000, 30_000])
def test_a_group_s_prompt_is_stored_once(tokens: int) -> None:
    draw, distinct = np.random.default_rng(0), 240_000
    prompts = [draw.integers(0, 2**31, tokens, np.int32) for _ in range(distinct // tokens)]
    table = pa.table({"prompt_ids": pa.array([one for one in prompts for _ in range(8)], pa.list_(pa.int32()))})
    assert len(to_parquet(table)) <= 1.02 * 4 * distinct


def test_finished_groups_survive_and_are_taken_over_by_the_next_attempts(ledger: Ledger) -> None:
    tables = {group: rollout_table([group], seed=group) for group in range(6)}
    with SampleLog(_attempt(ledger), "inputs") as log:
        assert log.recover().equals(ROLLOUT.empty_table())
        for group in (0, 1):
            log.append(tables[group])
    with SampleLog(_attempt(ledger), "inputs") as log:
        assert _groups(log.recover()) == [0, 1]
        log.append(pa.concat_tables([tables[3], tables[2]]))
    with SampleLog(_attempt(ledger), "inputs") as log:
        recovered = log.recover().sort_by("group_id")
    assert recovered.equals(pa.concat_tables([tables[group] for group in range(4)]).combine_chunks())


def test_parts_of_other_inputs_or_shards_and_torn_ones_are_ignored(ledger: Ledger) -> None:
    for shard, inputs, group in (("00-000", "other", 1), ("00-001", "inputs", 2), (None, "inputs", 3)):
        with SampleLog(_attempt(ledger, shard), inputs) as log:
            log.append(rollout_table([group]))
    with SampleLog(_attempt(ledger), "inputs") as log:
        log.append(rollout_table([4]))
    with SampleLog(torn := _attempt(ledger), "inputs") as log:
        log.append(rollout_table([5]))
    (path,) = ledger.store.find(torn.folder)
    ledger.store.write(path, ledger.store.read(path)[:-40])
    ledger.store.write(f"{torn.folder}/write_ahead/junk", b"junk")
    with SampleLog(_attempt(ledger), "inputs") as log:
        assert _groups(log.recover()) == [4]


def test_a_group_written_twice_counts_once(ledger: Ledger) -> None:
    for groups in ([1, 2], [2, 3]):
        with SampleLog(_attempt(ledger), "inputs") as log:
            log.append(rollout_table(groups))
    with SampleLog(_attempt(ledger), "inputs") as log:
        recovered = log.recover()
    assert sorted(recovered["group_id"].to_pylist()) == [1, 1, 2, 2, 3, 3]


def test_the_commit_removes_the_parts_that_it_made_useless(ledger: Ledger) -> None:
    with SampleLog(_attempt(ledger), "inputs") as log:
        log.append(rollout_table([1]))
    attempt = _attempt(ledger)
    with SampleLog(attempt, "inputs") as log:
        rows = [log.recover(), rollout_table([2])]
        log.append(rows[1])
    assert len(_parts(ledger)) == 3, "one of the first, and what the second found and made"
    commit_step(ledger, 0, Step.ROLLOUT, "00-000", table=pa.concat_tables(rows), attempt=attempt)
    wait_for(lambda: not _parts(ledger))
    assert len(ledger.store.find(layout.iterations(ledger.run))) == 2


def test_groups_that_finish_during_a_write_are_taken_at_once_and_go_out_together(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, resume = threading.Event(), threading.Event()
    write = ledger.store.write

    def slow_write(path: str, data: bytes) -> None:
        if path.endswith(".arrow"):
            writing.set()
            assert resume.wait(60)
        write(path, data)

    monkeypatch.setattr(ledger.store, "write", slow_write)
    with SampleLog(_attempt(ledger), "inputs") as log:
        log.append(rollout_table([0]))
        assert writing.wait(60)
        for group in range(1, 30):
            log.append(rollout_table([group]))
        resume.set()
    assert len(_parts(ledger)) == 2
    with SampleLog(_attempt(ledger), "inputs") as log:
        assert _groups(log.recover()) == list(range(30))


def test_an_error_of_the_background_writer_is_raised(tmp_path: Path) -> None:
    ledger = Ledger.create(open_store(str(tmp_path)), "run-1", CONFIG)
    ledger.acquire()
    attempt = _attempt(ledger)
    folder = tmp_path / attempt.folder
    folder.parent.mkdir(parents=True)
    folder.write_bytes(b"a file in the way")
    log = SampleLog(attempt, "inputs")
    log.append(rollout_table([1]))
    with pytest.raises(StoreError, match="choose another store"):
        log.close()
    with pytest.raises(StoreError, match="choose another store"):
        log.append(rollout_table([2]))


def test_what_broke_the_work_off_is_raised_and_an_error_of_the_background_writer_noted_on_it(tmp_path: Path) -> None:
    ledger = Ledger.create(open_store(str(tmp_path)), "run-1", CONFIG)
    ledger.acquire()
    attempt = _attempt(ledger)
    (tmp_path / attempt.folder).parent.mkdir(parents=True)
    (tmp_path / attempt.folder).write_bytes(b"a file in the way")

    def generate() -> None:
        with SampleLog(attempt, "inputs") as log:
            log.append(rollout_table([1]))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        generate()
    (note,) = caught.value.__notes__
    assert note.startswith("StoreRefused meanwhile: ")


_GENERATE = """
import sys, time
sys.path.insert(0, {root!r})
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.logs.sample_log import SampleLog
from cairn.storage.opening import open_store
from tests.storage.builders import rollout_table
ledger = Ledger.open(open_store(sys.argv[1]), "run-1")
ledger.acquire()
log = SampleLog(ledger.attempt(0, Step.ROLLOUT, "00-000"), "inputs")
for group in range(1000):
    log.append(rollout_table([group], seed=group))
    print(group, flush=True)
    time.sleep(0.02)
"""


@pytest.mark.proof
def test_a_killed_generation_loses_at_most_the_group_in_flight(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    ledger = Ledger.create(store, "run-1", CONFIG)
    code = _GENERATE.format(root=str(Path(__file__).parents[3]))
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(20):
            last = int(process.stdout.readline())
        # The write in flight may have begun before the last group came; the one after it has that group.
        written = len(_parts(ledger))
        wait_for(lambda: len(_parts(ledger)) >= written + 2)
        process.kill()
    ledger.acquire()
    with SampleLog(_attempt(ledger), "inputs") as log:
        recovered = log.recover()
    groups = _groups(recovered)
    assert groups == list(range(len(groups)))
    assert len(groups) > last
    assert recovered.filter(pa.compute.field("group_id") == 7).equals(rollout_table([7], seed=7))


def test_a_discarded_attempt_leaves_its_finished_groups_alone(ledger: Ledger, tmp_path: Path) -> None:
    attempt, other = _attempt(ledger), _attempt(ledger)
    output = other.write_table("samples.parquet", rollout_table([3]))
    with SampleLog(attempt, "0" * 64) as log:
        log.append(rollout_table([1, 2]))
    attempt.write_table("samples.parquet", rollout_table([1, 2]))
    (tmp_path / "file").write_bytes(b"x")
    ledger.store.put_file(tmp_path / "file", attempt.path("folder/file"))
    attempt.discard()
    assert list(ledger.store.find(attempt.folder)) == _parts(ledger)
    assert len(read_table(ledger.store, ledger.run, output)) == 2
    with SampleLog(_attempt(ledger), "0" * 64) as log:
        assert _groups(log.recover()) == [1, 2]
