"""Published quantised weights: read as the numbers that they stand for, whole and in parts, or refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cairn.engines.models.folders import check_model_folder, open_weights, parameter_names
from cairn.engines.rollout.transformers.engine import TransformersEngine
from cairn.engines.types.errors import BadModel
from cairn.engines.weights.checksum import folder_checksum
from cairn.engines.weights.fingerprint import weights_checksum
from tests.engines.rollout.models import rollout_config
from tests.engines.training.builders import make_engine
from tests.quantized_models import Tensors, fp8_folder, int4_folder, mxfp4_folder, set_config, write

FOLDERS: dict[str, Callable[[Path], Tensors]] = {
    "FP8": lambda folder: fp8_folder("qwen3_moe", folder),
    "FP8, DeepSeek": lambda folder: fp8_folder("deepseek_v3", folder),
    "MXFP4": mxfp4_folder,
    "INT4": lambda folder: int4_folder("qwen3_moe", folder),
}


@pytest.fixture(scope="module", params=FOLDERS)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    folder = tmp_path_factory.mktemp("quantized")
    return folder, FOLDERS[request.param](folder)


def test_every_weight_is_what_its_parts_stand_for_and_has_its_published_name(quantized: tuple[Path, Tensors]) -> None:
    folder, weights = quantized
    result = open_weights(folder)
    assert result.keys() == weights.keys() == parameter_names(folder)
    for name, weight in weights.items():
        assert result[name].get_shape() == list(weight.shape)
        assert torch.equal(result[name][...], weight), name


def test_a_part_of_a_weight_is_scaled_by_the_right_scales(quantized: tuple[Path, Tensors]) -> None:
    folder, weights = quantized
    for name, part in open_weights(folder).items():
        for rows in (slice(7, 31), slice(30, 32), slice(1, 2)):
            assert torch.equal(part[rows], weights[name][rows]), (name, rows)
        if weights[name].dim() == 3:
            assert torch.equal(part[2:3, 5:50], weights[name][2:3, 5:50]), name


def test_both_engines_of_the_library_hold_the_dequantised_weights(
    quantized: tuple[Path, Tensors], tmp_path: Path
) -> None:
    folder, weights = quantized
    make_engine(folder).export_hf(tmp_path)
    exported = load_file(tmp_path / "model.safetensors")
    parameters = {name for name in weights if not name.endswith("e_score_correction_bias")}
    assert parameters <= exported.keys() <= weights.keys()
    assert all(torch.equal(weight, weights[name]) for name, weight in exported.items())
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    rollout, plain = (TransformersEngine(str(path), rollout_config(dtype="bfloat16")) for path in (folder, tmp_path))
    assert rollout.weights_checksum() == plain.weights_checksum()
    assert folder_checksum(folder, "float32") == weights_checksum(weights.items())


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8"},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {},
        },
    ],
)
def test_another_way_of_quantising_is_refused_by_its_name(quantization: dict[str, Any], tmp_path: Path) -> None:
    fp8_folder("qwen3", tmp_path)
    set_config(tmp_path, quantization_config=quantization)
    with pytest.raises(BadModel, match=f"quantised by {quantization['quant_method']} in an unsupported way"):
        check_model_folder(tmp_path)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [24.0, 40.0]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": None}}},
    ],
)
def test_a_torn_quantization_config_is_told_in_one_sentence(quantization: dict[str, Any], tmp_path: Path) -> None:
    fp8_folder("qwen3", tmp_path)
    set_config(tmp_path, quantization_config=quantization)
    with pytest.raises(BadModel, match=r"The quantization_config in .*config\.json is not one of a published model"):
        check_model_folder(tmp_path)


def test_numbers_in_fp8_are_never_taken_without_their_scales(tmp_path: Path) -> None:
    fp8_folder("qwen3", tmp_path)
    values, scales = sorted(tmp_path.glob("*.safetensors"))
    index = tmp_path / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    of_values = {name: file for name, file in said["weight_map"].items() if file == values.name}
    index.write_text(json.dumps({"weight_map": of_values}))
    for quantization in (json.loads((tmp_path / "config.json").read_text())["quantization_config"], None):
        set_config(tmp_path, quantization_config=quantization)
        with pytest.raises(BadModel, match="is in FP8, and its scales are not in the weight files"):
            check_model_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {**of_values, "model.scale_inv": scales.name}}))
    set_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [24, 40]})
    check_model_folder(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    for torn in (torch.zeros(96 * 64).to(torch.float8_e4m3fn), torch.zeros(96, 64, dtype=torch.bfloat16)):
        save_file({**load_file(values), name: torn}, values, metadata={"format": "pt"})
        with pytest.raises(BadModel, match=f"{name}_scale_inv scales a matrix of F8_E4M3"):
            check_model_folder(tmp_path)


def test_quantised_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    fp8_folder("qwen3", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    set_config(tmp_path, quantization_config=None)
    with pytest.raises(BadModel, match="has no quantization_config"):
        check_model_folder(tmp_path)
    set_config(tmp_path, quantization_config={**said, "weight_block_size": [16, 16]})
    with pytest.raises(BadModel, match=r"has shape .* where its weight's shape requires"):
        check_model_folder(tmp_path)
    mxfp4_folder(tmp_path / "experts")
    tensors = {
        name: tensor
        for file in (tmp_path / "experts").glob("*.safetensors")
        for name, tensor in load_file(file).items()
        if not name.endswith("layers.1.mlp.experts.down_proj_scales")
    }
    (tmp_path / "experts" / "model.safetensors").touch()
    write(tmp_path / "experts", tensors, {"quant_method": "mxfp4"})
    with pytest.raises(BadModel, match=r"belongs to '.*down_proj_scales', which the weight files lack"):
        check_model_folder(tmp_path / "experts")
