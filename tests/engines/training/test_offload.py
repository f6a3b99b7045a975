"""A training engine that gives its memory away and takes it back."""

from pathlib import Path

import pytest

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.engines.types.errors import EngineError
from cairn.storage.opening import open_store
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

REFERENCE = AlgorithmConfig(use_kl_loss=True, kl_loss_coef=0.05)
BATCH = make_batch(ref=True)


def test_updates_around_an_offload_end_in_the_same_bits(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    plain, offloaded = (make_engine(folder, algorithm=REFERENCE) for _ in range(2))
    for version in range(3):
        for engine in (plain, offloaded):
            engine.train(BATCH, num_steps=1, expected_version=version, input_digest=str(version))
        offloaded.offload()
        offloaded.offload()
        assert offloaded.position().state_digest == plain.position().state_digest
        assert all(weight.equal(weights_of(plain)[name]) for name, weight in weights_of(offloaded).items())
        offloaded.onload()
        offloaded.onload()
    for one, other in zip(plain.score(BATCH, "ref"), offloaded.score(BATCH, "ref"), strict=True):
        assert (one == other).all()


def test_an_offloaded_engine_refuses_to_work_and_says_why(tmp_path: Path) -> None:
    engine, store = make_engine(model_folder(tmp_path / "model")), open_store(str(tmp_path))
    engine.save(store, "saved")
    engine.offload()
    assert engine.health()["offloaded"]
    for work in (
        lambda: engine.train(BATCH, num_steps=1, expected_version=0, input_digest="x"),
        lambda: engine.score(BATCH, "actor"),
        lambda: engine.save(store, "again"),
        lambda: engine.load(store, "saved"),
    ):
        with pytest.raises(EngineError, match="offloaded: onload it first"):
            work()
    engine.onload()
    engine.load(store, "saved")
