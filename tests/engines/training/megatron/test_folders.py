"""Model folders that Megatron reads, on one rank and on two, and writes again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.training.megatron.folder_cases import LAYOUTS, launched
from tests.engines.training.ranks import run_forking
from tests.quantized_models import Tensors, fp8_folder, int4_folder, mxfp4_folder

QUANTIZED = {
    "FP8": lambda folder: fp8_folder("qwen3_moe", folder),
    "MXFP4": mxfp4_folder,
    "INT4": lambda folder: int4_folder("qwen3_moe", folder),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensors]]:
    work = tmp_path_factory.mktemp("folders")
    weights = {name: make(work / name) for name, make in QUANTIZED.items()}
    run_forking(launched, work, list(QUANTIZED))
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
