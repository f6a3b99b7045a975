"""Architectures behind real servers, and the reasons why some have none without a GPU."""

from pathlib import Path

import pytest

from cairn.engines.rollout.sglang.problems import UNSERVED
from tests.architectures import ARCHITECTURES, Architecture, architecture
from tests.engines.models.test_iteration import batch_of, requests
from tests.engines.training.builders import make_engine
from tests.model_table import Check, record
from tests.requests import by_id
from tests.sglang_architectures import MEASURED, TESTED, largest_difference, reason, start

pytestmark = pytest.mark.timeout(900)


@pytest.mark.slow
@pytest.mark.parametrize("name", TESTED)
def test_a_server_samples_from_the_model_and_from_what_the_trainer_makes_of_it(name: str, tmp_path: Path) -> None:
    folder = architecture(name).save(tmp_path / "model")
    engine = start(folder, tmp_path / "server.log")
    try:
        before = largest_difference(engine, folder)
        requested = requests(max_new_tokens=12)
        training = make_engine(folder)
        batch = batch_of(requested, by_id(engine.generate(requested)))
        training.train(batch, num_steps=1, expected_version=0, input_digest="d")
        engine.begin_weight_update(1)
        for bucket in training.export_weights(1 << 18):
            engine.update_weights(bucket)
        engine.end_weight_update()
        assert engine.weights_checksum() == training.weights_checksum("float32")
        training.export_hf(tmp_path / "trained")
        after = largest_difference(engine, tmp_path / "trained")
    finally:
        engine.close()
    record(name, Check.SGLANG, max(before, after))
    assert max(before, after) <= 1e-4


@pytest.mark.parametrize("of", ARCHITECTURES, ids=lambda each: each.name)
def test_every_architecture_is_served_or_there_is_a_reason(of: Architecture) -> None:
    served = of.name in TESTED or of.name in MEASURED
    why = reason(of)
    assert served == (why is None)
    if why is not None:
        record(of.name, Check.SGLANG, why)
    elif of.name in MEASURED:
        record(of.name, Check.SGLANG, MEASURED[of.name])


def test_reasons_are_of_models_that_there_are() -> None:
    assert UNSERVED.keys() <= {of.model_type for of in ARCHITECTURES}
