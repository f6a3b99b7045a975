"""Engines of a real fleet read what sync steps stored: the difference where they hold the version before, and whole
weights and differences elsewhere. No trainer takes part."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.configs.schema.run import RunConfig
from cairn.engines.fleet.cluster import Cluster
from cairn.engines.fleet.fleet import Fleet
from cairn.flows.iteration import iteration
from cairn.storage.ledger import layout
from cairn.storage.ledger.commits import Commit, Step
from cairn.storage.ledger.publications import stored
from cairn.storage.store.errors import Damaged
from cairn.tasks.durable.context import RunContext
from cairn.tasks.trainer.sync import serve
from tests.tiny_run import DirectSteps, tiny_config, tiny_context

pytestmark = pytest.mark.proof


@pytest.fixture(scope="module")
def config(tiny_assets: Path) -> RunConfig:
    return tiny_config(
        tiny_assets,
        rollout={"num_rollout": 5, "dtype": "bfloat16", "rollout_max_response_len": 4},
        training={"dtype": "bfloat16", "lr": 1e-5, "num_threads": 1},
        fleet={"update_weight_transport": "store"},
    )


@pytest.fixture
def run(config: RunConfig, ray_cluster: Cluster, tmp_path: Path) -> Iterator[RunContext]:
    with (
        Fleet.start(config, name="stored", total_steps=5) as fleet,
        tiny_context(str(tmp_path), config, fleet=fleet) as (run, _),  # type: ignore[arg-type]
    ):
        for index in range(2):
            iteration(run, DirectSteps(run), index)
        yield run


def file_of(run: RunContext, index: int) -> Path:
    synced = run.committed(index, Step.SYNC)
    return Path(run.ledger.store.url, layout.in_run(synced.run, synced.outputs[0].path))


def trained(run: RunContext, index: int) -> Commit:
    return run.committed(index, Step.TRAIN)


def test_an_engine_reads_the_difference_alone_and_one_that_joins_reads_all(run: RunContext) -> None:
    (engine,) = run.fleet.rollout
    serve(run, engine, trained(run, 0))
    whole = file_of(run, 0)
    whole.rename(whole.with_suffix(".away"))
    assert [bool(how and how.base) for how in (stored(run.committed(index, Step.SYNC)) for index in (0, 1))] == [
        False,
        True,
    ]
    serve(run, engine, trained(run, 1))  # it holds the version before
    assert engine.health()["weight_version"] == 2
    engine.restart()
    with pytest.raises(Damaged, match=f"{whole.name}, a part of weight version 1 of tiny .* is missing"):
        serve(run, engine, trained(run, 1))
    whole.with_suffix(".away").rename(whole)
    serve(run, engine, trained(run, 1))
    assert engine.health()["weight_version"] == 2
    iteration(run, DirectSteps(run), 2)
    assert run.fleet.training.position().weight_version == 3
    engine.restart()
    serve(run, engine, trained(run, 0))  # an older version, for which the trainer does not go back
    assert engine.health()["weight_version"] == 1
    assert run.fleet.training.position().weight_version == 3


def test_a_damaged_difference_changes_nothing_and_is_named(run: RunContext) -> None:
    (engine,) = run.fleet.rollout
    serve(run, engine, trained(run, 0))
    file = file_of(run, 1)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(Damaged, match=f"{file.name}, a part of weight version 2 of tiny .* is damaged"):
        serve(run, engine, trained(run, 1))
    file.write_bytes(data)
    serve(run, engine, trained(run, 1))
    assert engine.health()["weight_version"] == 2
