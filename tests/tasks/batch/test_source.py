"""Training ranks read a batch from its snapshots: each its own sequences, and every file once."""

import pickle
from collections.abc import Collection
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import torch.distributed as dist

from cairn.engines.training.rows import Rows
from cairn.engines.types.batches import BatchOutline
from cairn.engines.types.types import SamplingSupport, TrainBatch
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.ledger.schemas import ADVANTAGE, ROUTED, SCORE, SUPPORT, TRAJECTORIES, TRAJECTORY_PROMPTS
from cairn.storage.ledger.snapshots import AttemptFolder
from cairn.storage.store.errors import Damaged
from cairn.storage.store.local import LocalStore
from cairn.tasks.batch.batch import Selected, support_column
from cairn.tasks.batch.sequences import routed_column
from cairn.tasks.batch.source import Snapshot, SnapshotBatch, SnapshotReader
from tests.engines.training.ranks import run_ranks
from tests.flows.written_runs import new_run
from tests.storage.builders import rollout_table

PLACES = ((0, "00-000", 1), (1, "00-001", 4), (0, "00-000", 0), (1, "00-000", 3), (1, "00-001", 5))
"""Trained groups: iteration, shard and id. Those of a shard are not together, and group 2 is not trained on."""
SHARDS = {(0, "00-000"): [0, 1, 2], (1, "00-000"): [3], (1, "00-001"): [4, 5]}
SAMPLES, TOKENS, LAYERS, TOP_K = 3, 6, 2, 2


def written(ledger: Ledger, step: Step, shard: str, table: pa.Table) -> Snapshot:
    attempt: AttemptFolder = ledger.attempt(1, step, shard)
    return Snapshot(ledger.run, attempt.write_table("samples.parquet", table))


def made(ledger: Ledger, *, masks: bool = False) -> SnapshotBatch:
    """Samples that differ in all that samples may differ in: trajectories, prompts of their own, support and routes
    that only some shards have, masked and stale tokens, a removed sample."""
    draw = np.random.default_rng(0)
    rollouts = {}
    for number, (place, groups) in enumerate(SHARDS.items()):
        table = rollout_table(groups, samples=SAMPLES, tokens=TOKENS, seed=number)
        mask = draw.integers(0, 2, (table.num_rows, TOKENS)).astype(np.uint8)
        for name, values in {"loss_mask": mask, "weight_versions": draw.integers(0, 2, mask.shape)}.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, pa.array(list(values), table.schema.field(name).type))
        if number == 1:
            table = table.append_column(TRAJECTORIES, pa.array([[2, 4], None, [1, 2, 3]], TRAJECTORIES.type))
            prompts = pa.array([[None, [9, 9, 9, 9]], None, None], TRAJECTORY_PROMPTS.type)
            table = table.append_column(TRAJECTORY_PROMPTS, prompts)
        if number == 2:
            sets = [
                [{*draw.integers(0, 9, 3).tolist(), int(id)} for id in ids.as_py()] for ids in table["response_ids"]
            ]
            supports = [SamplingSupport.of([sorted(one) for one in sample]) for sample in sets]
            table = table.append_column(SUPPORT, support_column(supports))
            routes = [draw.integers(0, 8, (3 + TOKENS - 1, LAYERS, TOP_K)).astype(np.uint8) for _ in sets]
            table = table.append_column(ROUTED, routed_column([[one] if i else [None] for i, one in enumerate(routes)]))
        rollouts[place] = written(ledger, Step.ROLLOUT, f"{place[0]}{place[1]}", table)
    count = len(PLACES) * SAMPLES
    floats = draw.normal(size=(3, count, TOKENS)).astype(np.float32)
    keys = {"group_id": [id for _, _, id in PLACES for _ in range(SAMPLES)], "sample_index": [*range(SAMPLES)] * 5}
    estimated = {
        **keys,
        "reward": [0.0] * count,
        "advantages": list(floats[0]),
        "returns": list(floats[1]),
        "ages": None,
    }
    estimated["ages"] = [[0] * TOKENS] * count
    scored = {**keys, "log_probs": list(floats[2]), "ref_log_probs": [None] * count}
    kept = pa.schema([SCORE.field(name) for name in scored])
    return SnapshotBatch(
        ledger.store.url,
        ledger.run,
        ledger.manifest.identity,
        Selected(1, PLACES, dict.fromkeys(range(6), 0) | {4: 1}, {3: frozenset({1})}, {5: [0.5]}),
        rollouts,
        written(ledger, Step.ADVANTAGE, "a", pa.table(estimated, ADVANTAGE)),
        written(ledger, Step.SCORE, "s", pa.table(scored, kept)),
        replays=True,
        rollout_is_old=False,
        samples=True,
        reads_returns=True,
        masks=masks,
    )


def plain(value: Any) -> Any:
    if isinstance(value, SamplingSupport):
        return value.ids.tolist(), value.counts.tolist()
    return (str(value.dtype), value.tolist()) if isinstance(value, np.ndarray) else value


def holds(batch: TrainBatch, whole: TrainBatch, own: Collection[int]) -> None:
    """Check that a batch is another one with the rows of some sequences, and at most those of their samples."""
    samples = {whole.sample_of[sequence] for sequence in own}
    shared = ("response_lengths", "groups", "samples")
    for field in fields(whole):
        found, expected = getattr(batch, field.name), getattr(whole, field.name)
        if field.name == "routed_choices" or not isinstance(expected, list):
            continue
        if field.name in shared:
            assert found == expected, field.name
            continue
        for sequence, value in enumerate(expected):
            if sequence in own:
                assert plain(found[sequence]) == plain(value), (field.name, sequence)
            elif whole.sample_of[sequence] not in samples:
                assert found[sequence] is None, (field.name, sequence)
    assert whole.routed_experts is not None
    choices = [0 if experts is None else experts.size for experts in whole.routed_experts]
    assert (batch.routed_choices or choices) == choices
    assert sum(choices) > 0


def parted(count: int, ranks: int) -> list[set[int]]:
    """Sequences of each rank; two ranks share theirs, as tensor-parallel ones do."""
    parts = [set(range(rank, count, ranks - 1)) for rank in range(ranks - 1)]
    return [*parts, parts[0]]


def alone(source: SnapshotBatch, own: Collection[int]) -> TrainBatch:
    rows = Rows(0, 1, torch.device("cpu"), timedelta(seconds=60))
    reader = source.reader()
    rows.outline(reader)
    return rows.read(reader, own)


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    return new_run(str(tmp_path_factory.mktemp("store")))


def test_a_part_of_a_batch_has_its_own_rows_bit_for_bit_and_the_sizes_of_all(ledger: Ledger) -> None:
    source = made(ledger)
    whole = SnapshotReader(source, ledger).whole()
    outline = source.reader()
    sizes = outline.outline([outline.sizes(part) for part in range(outline.parts)])
    assert sizes == BatchOutline.of(whole)
    assert whole.samples is not None
    assert len(whole) > len(PLACES) * SAMPLES
    for own in parted(len(whole), 4):
        holds(alone(source, own), whole, own)
    assert sizes.trained != sizes.divisors, "the witness that tokens are masked for their age or by the filter"


def test_what_the_driver_sends_does_not_grow_with_tokens(ledger: Ledger) -> None:
    assert len(pickle.dumps(made(ledger))) < 4000


def test_a_damaged_file_is_named(ledger: Ledger) -> None:
    source = made(ledger)
    assert source.advantages is not None
    other = source.advantages.table.model_copy(update={"sha256": "0" * 64})
    with pytest.raises(Damaged, match="is not what was committed"):
        alone(replace(source, advantages=replace(source.advantages, table=other)), {0})


def test_ranks_read_each_file_once_and_raise_together_what_one_raises(ledger: Ledger, tmp_path: Path) -> None:
    source = made(ledger, masks=True)
    whole = SnapshotReader(source, ledger).whole()
    broken = source.rollouts[1, "00-000"]
    absent = replace(broken, table=broken.table.model_copy(update={"path": f"{broken.table.path}x"}))
    lost = replace(source, rollouts={**source.rollouts, (1, "00-000"): absent})
    run_ranks(on_rank, tmp_path, source, lost, whole, world_size=3)
    reads = [path for rank in range(3) for path in (tmp_path / f"reads-{rank}").read_text().splitlines()]
    assert sorted(reads) == sorted(
        f"runs/{one.run}/{one.table.path}"
        for one in (*source.rollouts.values(), source.advantages, source.scores)
        if one
    )


def on_rank(rank: int, work: Path, source: SnapshotBatch, lost: SnapshotBatch, whole: TrainBatch) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=3)
    rows = Rows(rank, 3, torch.device("cpu"), timedelta(seconds=60))
    reads, read = list[str](), LocalStore.read

    def counting(self: LocalStore, path: str) -> bytes:
        reads.append(path)
        return read(self, path)

    LocalStore.read = counting  # type: ignore[method-assign]
    reader = source.reader()
    outline = rows.outline(reader)
    own = parted(len(outline), 3)[rank]
    holds(rows.read(reader, own), whole, own)
    (work / f"reads-{rank}").write_text("".join(f"{path}\n" for path in reads if path.endswith(".parquet")))
    if rank == 0:
        assert whole.samples is not None
        found = np.concatenate(reader.masks)
        assert np.array_equal(found, np.concatenate(whole.loss_mask))
    with pytest.raises(Damaged, match=r"samples\.parquetx is committed but missing"):
        rows.outline(lost.reader())
    dist.destroy_process_group()
