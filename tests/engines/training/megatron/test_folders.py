"""Model folders that Megatron reads, on one rank and on two, and writes again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cairn.engines.models import open_weights
from tests.engines.training.megatron.folder_cases import LAYOUTS, launched
from tests.engines.training.ranks import run_forking
from tests.mtp_models import mtp_folder
from tests.quantized_models import Tensors, fp8_folder, int4_folder, mxfp4_folder

QUANTIZED = {
    "FP8": lambda folder: fp8_folder("qwen3_moe", folder),
    "FP8, DeepSeek": lambda folder: fp8_folder("deepseek_v3", folder),
    "MXFP4": mxfp4_folder,
    "INT4": lambda folder: int4_folder("qwen3_moe", folder),
}
MTP = ["deepseek_v3", "mimo"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    work = tmp_path_factory.mktemp("folders")
    weights = {name: make(work / name) for name, make in QUANTIZED.items()}
    weights |= {name: mtp_folder(name, work / name) for name in MTP}
    run_forking(launched, work, [*QUANTIZED, *MTP])
    return work, weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", QUANTIZED)
def test_every_layout_holds_the_dequantised_weights_bit_for_bit(
    folders: tuple[Path, dict[str, Tensors]], name: str, layout: str
) -> None:
    work, weights = folders
    folder = work / f"{name} {layout}"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights[name].keys()
    assert all(torch.equal(tensor, weights[name][key]) for key, tensor in found.items())
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MTP)
def test_layers_that_are_not_trained_are_kept_byte_for_byte(
    folders: tuple[Path, dict[str, Tensors]], name: str, layout: str
) -> None:
    work, kept = folders
    found, before = open_weights(work / f"{name} {layout}"), open_weights(work / name)
    assert found.keys() == before.keys() >= kept[name].keys()
    assert all(torch.equal(tensor[...], before[key][...]) for key, tensor in found.items())
    assert all(found[key][...].dtype == torch.bfloat16 for key in kept[name])
