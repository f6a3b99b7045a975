from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.published import published_weights
from cairn.engines.training.torch.engine import TorchEngine
from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.training.builders import make_batch, make_engine, model_folder, weights_of

BATCH = make_batch(4)


def trained(path: Path, family: str = "qwen3", **training: object) -> TorchEngine:
    engine = make_engine(model_folder(path, family), **training)  # type: ignore[arg-type]
    engine.train(BATCH, num_steps=1, expected_version=0, input_digest="d")
    return engine


def test_weights_come_under_hugging_face_names_tied_ones_once_in_buckets(tmp_path: Path) -> None:
    engine = trained(tmp_path)
    buckets = list(engine.export_weights(30_000))
    names = [name for bucket in buckets for name in bucket]
    assert names == [name for name, _ in load_causal_lm(tmp_path, torch.float32).named_parameters()]
    assert "lm_head.weight" not in names
    assert len(buckets) > 2
    for bucket in buckets:
        assert sum(tensor.nbytes for tensor in bucket.values()) <= 30_000 or len(bucket) == 1


def test_exported_weights_are_copies_that_later_training_leaves_alone(tmp_path: Path) -> None:
    engine = trained(tmp_path)
    exported, checksum = weights_of(engine), engine.weights_checksum()
    engine.train(BATCH, num_steps=1, expected_version=1, input_digest="d")
    assert weights_checksum(exported.items()) == checksum != engine.weights_checksum()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("received", ["float32", "bfloat16"])
def test_the_checksum_is_that_of_an_engine_which_received_the_weights(
    tmp_path: Path, dtype: str, received: str
) -> None:
    engine = trained(tmp_path, dtype=dtype)
    receiver = load_causal_lm(tmp_path, getattr(torch, received))
    receiver.load_state_dict(weights_of(engine), strict=False)
    assert weights_checksum(receiver.named_parameters()) == engine.weights_checksum(received)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt_neox", "gemma2"])
def test_the_model_folder_loads_with_the_trained_weights(tmp_path: Path, family: str) -> None:
    engine = trained(tmp_path / "model", family)
    engine.export_hf(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(loaded) is type(load_causal_lm(tmp_path / "model", torch.float32))
    assert loaded.dtype == torch.float32
    assert weights_checksum(published_weights(loaded).items()) == engine.weights_checksum()
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_a_bfloat16_engine_writes_a_bfloat16_folder(tmp_path: Path) -> None:
    engine = trained(tmp_path / "model", dtype="bfloat16")
    engine.export_hf(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert weights_checksum(loaded.named_parameters()) == engine.weights_checksum()
