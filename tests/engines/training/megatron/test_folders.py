"""Model folders that Megatron reads, on one rank and on two, and writes again."""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cairn.engines.models.folders import open_weights
from tests.engines.training.megatron.folder_cases import LAYOUTS, launched
from tests.engines.training.ranks import run_with_megatron
from tests.mtp_models import mtp_folder
from tests.quantized_models import Tensors, fp8_folder, int4_folder, mxfp4_folder
from tests.tiers import Tier, marks, selected

QUANTIZED: dict[str, Callable[[Path], Tensors]] = {
    "FP8, DeepSeek": lambda folder: fp8_folder("deepseek_v3", folder),
    "FP8": lambda folder: fp8_folder("qwen3_moe", folder),
    "MXFP4": mxfp4_folder,
    "INT4": lambda folder: int4_folder("qwen3_moe", folder),
}
MTP: dict[str, Callable[[Path], Tensors]] = {name: partial(mtp_folder, name) for name in ("deepseek_v3", "mimo")}
PROVED = ("FP8, DeepSeek", "deepseek_v3")


def some(names: Iterable[str]) -> list[Any]:
    """Parameters with the marks of their tiers."""
    return [pytest.param(name, marks=marks(Tier.PROOFS if name in PROVED else Tier.ALL)) for name in names]


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Tensors]]:
    """Every folder that a selected test asks for, read and written in one launch."""
    work = tmp_path_factory.mktemp("folders")
    weights = {name: {**QUANTIZED, **MTP}[name](work / name) for name in selected(request, "name")}
    run_with_megatron(launched, work, list(weights), [name for name in weights if name in MTP])
    return work, weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", some(QUANTIZED))
def test_every_layout_holds_the_dequantised_weights_bit_for_bit(
    folders: tuple[Path, dict[str, Tensors]], name: str, layout: str
) -> None:
    work, weights = folders
    folder = work / f"{name} {layout}"
    found = load_file(folder / "model.safetensors")
    assert found.keys() == weights[name].keys()
    assert all(torch.equal(tensor, weights[name][key]) for key, tensor in found.items())
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("written", [*LAYOUTS, "converted"])
@pytest.mark.parametrize("name", some(MTP))
def test_layers_that_are_not_trained_are_kept_byte_for_byte(
    folders: tuple[Path, dict[str, Tensors]], name: str, written: str
) -> None:
    work, untrained = folders
    found, before = open_weights(work / f"{name} {written}"), open_weights(work / name)
    assert found.keys() == before.keys() >= untrained[name].keys()
    assert all(torch.equal(tensor[...], before[key][...]) for key, tensor in found.items())
    assert all(found[key][...].dtype == torch.bfloat16 for key in untrained[name])
