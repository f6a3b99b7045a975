from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.rollout.models import collect, configs, random_requests, request, rollout_config, same, save_model


@pytest.fixture
def other(tmp_path: Path) -> tuple[TransformersEngine, dict[str, torch.Tensor]]:
    """An engine with other weights of the same architecture, and those weights."""
    folder = save_model(configs()["qwen3"], tmp_path, seed=1)
    return TransformersEngine(folder, rollout_config()), load_file(tmp_path / "model.safetensors")


def update(engine: TransformersEngine, version: int, weights: dict[str, torch.Tensor]) -> None:
    engine.begin_weight_update(version)
    for name, tensor in weights.items():
        engine.update_weights({name: tensor})
    engine.end_weight_update()


@pytest.mark.parametrize("architecture", configs())
def test_updated_weights_generate_what_an_engine_loaded_with_them_does(
    architecture: str, model_folders: dict[str, str], tmp_path: Path
) -> None:
    engine = TransformersEngine(model_folders[architecture], rollout_config())
    requests = random_requests(seed=4, count=8)
    before = collect(engine, requests)
    folder = save_model(configs()[architecture], tmp_path, seed=1)
    update(engine, 5, dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))
    after, expected = collect(engine, requests), collect(TransformersEngine(folder, rollout_config()), requests)
    assert all(same(after[key], sample) for key, sample in expected.items())
    assert {int(v) for sample in after.values() for v in sample.weight_versions} == {5}
    assert not all(same(after[key], sample) for key, sample in before.items())


def test_no_version_and_no_tokens_between_begin_and_end(qwen3: TransformersEngine, other: tuple) -> None:
    _, weights = other
    assert qwen3.get_weight_version() == 0
    qwen3.begin_weight_update(1)
    assert qwen3.get_weight_version() is None
    with pytest.raises(EngineError, match="between begin and end of a weight update"):
        qwen3.generate(request(0, [1]))
    qwen3.update_weights(weights)
    assert qwen3.get_weight_version() is None
    qwen3.end_weight_update()
    assert qwen3.get_weight_version() == 1


def test_a_missing_weight_is_named_and_the_engine_keeps_refusing(qwen3: TransformersEngine, other: tuple) -> None:
    _, weights = other
    incomplete = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(EngineError, match=r"version 1 lacks 1 weights, the first of them model\.norm\.weight"):
        update(qwen3, 1, incomplete)
    assert qwen3.get_weight_version() is None
    qwen3.update_weights({"model.norm.weight": weights["model.norm.weight"]})
    qwen3.end_weight_update()
    assert qwen3.get_weight_version() == 1


def test_an_update_that_begins_again_needs_every_weight_again(qwen3: TransformersEngine, other: tuple) -> None:
    _, weights = other
    qwen3.begin_weight_update(1)
    qwen3.update_weights(weights)
    qwen3.begin_weight_update(2)
    with pytest.raises(EngineError, match="version 2 lacks"):
        qwen3.end_weight_update()


def test_an_unknown_name_and_another_shape_are_named_and_nothing_of_the_bucket_is_taken(
    qwen3: TransformersEngine, other: tuple
) -> None:
    _, weights = other
    before = qwen3.weights_checksum()
    qwen3.begin_weight_update(1)
    for bad, message in (
        ({"model.extra.weight": torch.zeros(2)}, r"no weight model\.extra\.weight"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape \(64,\) here and \(3,\)"),
    ):
        with pytest.raises(EngineError, match=message):
            qwen3.update_weights(weights | bad)
    assert qwen3.weights_checksum() == before


def test_tied_weights_may_be_sent_under_either_name_or_both(model_folders: dict[str, str], other: tuple) -> None:
    source, weights = other
    embedding = weights["model.embed_tokens.weight"]
    rest = {name: tensor for name, tensor in weights.items() if name != "model.embed_tokens.weight"}
    for tied in (
        {"model.embed_tokens.weight": embedding},
        {"lm_head.weight": embedding},
        {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding},
    ):
        engine = TransformersEngine(model_folders["qwen3"], rollout_config())
        update(engine, 1, rest | tied)
        assert engine.weights_checksum() == source.weights_checksum()


def test_update_without_begin_is_refused(qwen3: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="call begin_weight_update first"):
        qwen3.update_weights({})
    with pytest.raises(EngineError, match="call begin_weight_update first"):
        qwen3.end_weight_update()


def test_weights_are_cast_to_the_engines_dtype(model_folders: dict[str, str], other: tuple) -> None:
    _, weights = other
    engine = TransformersEngine(model_folders["qwen3"], rollout_config(dtype="bfloat16"))
    update(engine, 1, weights)
    assert engine.weights_checksum() == weights_checksum(
        (name, tensor.to(torch.bfloat16)) for name, tensor in weights.items()
    )


def test_the_checksum_is_that_of_the_sent_weights_and_changes_with_any_of_them(
    qwen3: TransformersEngine, other: tuple
) -> None:
    _, weights = other
    update(qwen3, 1, weights)
    assert qwen3.weights_checksum() == weights_checksum(weights.items())
    weights["model.norm.weight"][3] += 1e-6
    update(qwen3, 2, weights)
    assert qwen3.weights_checksum() == weights_checksum(weights.items())


def test_diverged_weights_are_an_error_and_good_ones_afterwards_serve_as_before(
    qwen3: TransformersEngine, other: tuple
) -> None:
    source, weights = other
    requests = random_requests(seed=6, count=6)
    update(qwen3, 1, {name: tensor * float("nan") for name, tensor in weights.items()})
    with pytest.raises(EngineError, match="version 1 give logits that are not finite"):
        list(qwen3.generate(requests))
    update(qwen3, 2, weights)
    after, expected = collect(qwen3, requests), collect(source, requests)
    assert all(same(after[key], sample) for key, sample in expected.items())


def test_the_weights_of_a_folder_are_those_of_an_engine_loaded_with_it(
    qwen3: TransformersEngine, other: tuple, tmp_path: Path
) -> None:
    source, _ = other
    qwen3.begin_weight_update(1)
    qwen3.update_weights_from_disk(tmp_path)
    qwen3.end_weight_update()
    assert qwen3.weights_checksum() == source.weights_checksum()


def test_a_folder_of_another_model_is_refused_and_the_engine_keeps_refusing(
    qwen3: TransformersEngine, tmp_path: Path
) -> None:
    qwen3.begin_weight_update(1)
    with pytest.raises(EngineError, match="different models"):
        qwen3.update_weights_from_disk(Path(save_model(configs()["gpt-neox"], tmp_path)))
    with pytest.raises(EngineError, match=r"cannot be loaded: .*does not exist"):
        qwen3.update_weights_from_disk(tmp_path / "none")
    assert qwen3.get_weight_version() is None


def test_an_engine_whose_memory_was_released_serves_nothing_until_it_has_weights_and_cache(
    qwen3: TransformersEngine, other: tuple
) -> None:
    _, weights = other
    qwen3.release_memory()
    qwen3.release_memory()
    assert qwen3.get_weight_version() is None
    with pytest.raises(EngineError, match="resume it before an update"):
        qwen3.begin_weight_update(1)
    qwen3.resume_memory("weights")
    update(qwen3, 1, weights)
    with pytest.raises(EngineError, match="memory was released"):
        qwen3.generate(request(0, [1]))
    qwen3.resume_memory("kv_cache")
    assert collect(qwen3, request(0, [1]))
