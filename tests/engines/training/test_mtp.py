"""Layers that predict several tokens ahead: no engine trains them, and none loses them."""

from pathlib import Path

import pytest
import torch

from cairn.configs.schema.training import LoraConfig
from cairn.engines.models.folders import load_causal_lm, open_weights, parameter_names, weight_files
from cairn.engines.training.torch.export import export_checkpoint
from cairn.engines.weights.checksum import checksums_as, folder_checksum
from cairn.storage.opening import open_store
from tests.architectures import architecture
from tests.engines.training.builders import make_engine
from tests.mtp_models import NAMES, mtp_folder, mtp_tensors
from tests.quantized_models import fp8_folder


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next", "mimo"])
def test_they_are_in_every_folder_that_is_written_byte_for_byte(name: str, tmp_path: Path) -> None:
    untrained = mtp_folder(name, tmp_path / "model")
    engine = make_engine(tmp_path / "model", dtype="float32")
    engine.export_hf(tmp_path / "out")
    found = open_weights(tmp_path / "out")
    for key, tensor in untrained.items():
        assert torch.equal(found[key][...].view(torch.int16), tensor.view(torch.int16)), key
    assert found.keys() - untrained.keys() >= {
        key for key, _ in engine._model.named_parameters() if "experts" not in key
    }


def test_they_are_kept_again_of_a_folder_that_was_written(tmp_path: Path) -> None:
    untrained = mtp_folder("mimo", tmp_path / "model")
    for source, target in (("model", "first"), ("first", "second")):
        make_engine(tmp_path / source).export_hf(tmp_path / target)
    second = open_weights(tmp_path / "second")
    assert all(torch.equal(second[key][...], tensor) for key, tensor in untrained.items())
    assert second.keys() == open_weights(tmp_path / "model").keys()
    load_causal_lm(tmp_path / "second", torch.float32)


def test_a_checkpoint_becomes_a_folder_that_has_them(tmp_path: Path) -> None:
    untrained = mtp_folder("mimo", tmp_path / "model")
    store = open_store(str(tmp_path))
    make_engine(tmp_path / "model").save(store, "checkpoint")
    export_checkpoint(store, "checkpoint", tmp_path / "model", tmp_path / "out", dtype=torch.float32, lora=LoraConfig())
    found = open_weights(tmp_path / "out")
    assert all(torch.equal(found[key][...], tensor) for key, tensor in untrained.items())


def test_digests_and_checksums_are_those_of_the_model_without_them(tmp_path: Path) -> None:
    mtp_folder("mimo", tmp_path / "model")
    architecture("qwen2").save(tmp_path / "without")
    engine, without = make_engine(tmp_path / "model"), make_engine(tmp_path / "without")
    assert engine.state_digest() == without.state_digest()
    assert parameter_names(tmp_path / "model") == parameter_names(tmp_path / "without")
    assert folder_checksum(tmp_path / "model", "float32") == engine.weights_checksum()
    engine.export_hf(tmp_path / "out")
    assert engine.weights_checksum() in checksums_as(tmp_path / "out", weight_files(tmp_path / "out"), torch.float32)


def test_quantised_ones_are_written_as_what_they_stand_for(tmp_path: Path) -> None:
    weights = fp8_folder("deepseek_v3", tmp_path / "model", mtp_tensors("deepseek_v3"))
    make_engine(tmp_path / "model", dtype="bfloat16").export_hf(tmp_path / "out")
    found = open_weights(tmp_path / "out")
    for key in NAMES["deepseek_v3"]:
        assert torch.equal(found[key][...], weights[key].bfloat16()), key
