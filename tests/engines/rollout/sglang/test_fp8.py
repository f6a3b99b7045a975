"""A real server that holds weights in FP8: it computes with what a trainer of plain weights sends.

SGLang has no kernel for FP8 without a GPU. Here a stand-in multiplies with the dequantised weights. Layers, names,
loaders and transports are SGLang's own. The stand-in computes in float32 and does not round activations, as kernels on
GPUs do.
"""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from cairn.configs.schema.algorithm import AlgorithmConfig
from cairn.configs.schema.run import ModelConfig
from cairn.configs.schema.training import TrainingConfig
from cairn.engines.models.folders import load_causal_lm
from cairn.engines.rollout.sglang import installation
from cairn.engines.rollout.sglang.engine import SGLangEngine
from cairn.engines.training.rank import TrainingRank
from cairn.engines.types.errors import EngineError
from cairn.engines.weights.layout import Meeting
from tests.engines.rollout.sglang.test_engine import generate, requests, worst_difference
from tests.quantized_models import dequantized, into_fp8
from tests.sglang_server import START_TIMEOUT, sglang_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCK = (32, 32)
"""Square, and divides every part of fused weights, as SGLang requires."""

KERNEL = """
import importlib.abc
import importlib.util
import runpy
import sys

runpy.run_path({stand_ins!r} + "/sitecustomize.py")


def replace_kernel(module):
    import torch

    def multiply(self, layer, x, bias=None):
        rows, columns = self.weight_block_size
        scales = layer.weight_scale_inv.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
        return torch.nn.functional.linear(x, (layer.weight.float() * scales).to(x.dtype), bias)

    module.Fp8Config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    module.Fp8LinearMethod.apply = multiply
    module.Fp8LinearMethod.process_weights_after_loading_block_quant = lambda self, layer: None


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "sglang.srt.layers.quantization.fp8":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module):
            load(module)
            replace_kernel(module)

        spec.loader.exec_module = loaded
        return spec


sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def served(sglang_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in FP8, with other weights."""
    folder = shutil.copytree(sglang_model, tmp_path_factory.mktemp("served") / "model")
    into_fp8(folder, block=BLOCK)
    return folder


@pytest.fixture(scope="module")
def fp8_engine(served: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    work = tmp_path_factory.mktemp("kernel")
    (work / "sitecustomize.py").write_text(KERNEL.format(stand_ins=str(installation.STAND_INS)))
    config = sglang_config().model_copy(update={"model_path": str(served)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(installation, "STAND_INS", f"{work}:{installation.STAND_INS}")
        engine = SGLangEngine(str(served), config, "cpu", work / "server.log", START_TIMEOUT)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def rank(sglang_model: Path, served: Path) -> TrainingRank:
    rank = TrainingRank("127.0.0.1", TrainingConfig(num_threads=1, dtype="float32"))
    rank.start(ModelConfig(path=str(sglang_model)), AlgorithmConfig(), 1.0, 1, 0, None, str(served))
    return rank


@pytest.fixture(scope="module")
def rounded(sglang_model: Path, rank: TrainingRank) -> PreTrainedModel:
    """The trainer's model with the numbers that its FP8 stands for."""
    model, sent = load_causal_lm(sglang_model, torch.float32), {}
    rank.begin_export(0, 1 << 30)
    while (bucket := rank.next_bucket()[0]) is not None:
        sent |= bucket
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in sent.items():
            if tensor.dtype == torch.float8_e4m3fn:
                weights[name].copy_(dequantized(tensor, sent[f"{name}_scale_inv"], BLOCK))
    return model


def tensors(rank: TrainingRank, engine: SGLangEngine) -> None:
    rank.begin_export(0, 100_000)
    while (bucket := rank.next_bucket()[0]) is not None:
        engine.update_weights(bucket)


def broadcasts(rank: TrainingRank, engine: SGLangEngine) -> None:
    host, port = rank.open_group("fp8", 60)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(engine.join_group, Meeting("fp8", host, port, "gloo", 2, 1, 60))
        rank.join_group(2, "gloo")
        joining.result()
        rank.begin_export(0, 100_000)
        while layout := rank.stage_bucket("gloo"):
            receiving = pool.submit(engine.receive_weights, layout)
            rank.broadcast_bucket()
            receiving.result()
    rank.leave_group()


def test_a_server_of_another_folder_generates_nothing_before_the_first_version(fp8_engine: SGLangEngine) -> None:
    assert fp8_engine.get_weight_version() is None
    with pytest.raises(EngineError, match="no weights of this run yet"):
        generate(fp8_engine, requests(1))


@pytest.mark.parametrize("send", [tensors, broadcasts])
def test_a_server_in_fp8_computes_with_the_trainers_weights_as_rounded(
    fp8_engine: SGLangEngine, rank: TrainingRank, rounded: PreTrainedModel, model: PreTrainedModel, send: Any
) -> None:
    fp8_engine.begin_weight_update(0)
    send(rank, fp8_engine)
    fp8_engine.end_weight_update()
    assert fp8_engine.get_weight_version() == 0
    requested = requests(6)
    done = generate(fp8_engine, requested)
    assert worst_difference(rounded, requested, done) < 1e-4
    assert worst_difference(model, requested, done) > 1e-3
