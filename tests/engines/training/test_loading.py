"""Loading of shards without the whole model: the same bits as those of the library, in every architecture."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from cairn.engines.models.folders import load_causal_lm
from cairn.engines.models.published import saved_buffers
from cairn.engines.training.sharding import shard_model, whole
from cairn.engines.training.torch.loading import fill, load_outline
from tests.architectures import ARCHITECTURES
from tests.engines.training.builders import GROUPED, SIZES, model_folder
from tests.engines.training.ranks import run_ranks

CPU = torch.device("cpu")


def differences(folder: Path, dtype: torch.dtype) -> list[str]:
    """The tensors of a model that differ between both ways of loading, non-persistent buffers included."""
    expected, found = load_causal_lm(folder, dtype), load_outline(folder, dtype)
    assert all(parameter.is_meta for parameter in found.parameters())
    shard_model(found, dtype, 1, CPU)
    fill(found, folder, CPU)
    known = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    tensors = {**dict(found.named_parameters()), **dict(found.named_buffers())}
    assert known.keys() == tensors.keys()
    assert dict(saved_buffers(expected)).keys() == dict(saved_buffers(found)).keys()
    return [
        name
        for name, tensor in known.items()
        if tensor.dtype != tensors[name].dtype or not tensor.equal(whole(tensors[name].detach()))
    ]


def test_shards_of_every_architecture_are_read_from_the_files(tmp_path: Path) -> None:
    found = {each.name: differences(each.save(tmp_path / each.name), torch.float32) for each in ARCHITECTURES}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # tied, and with buffers that are no weights
def test_tied_weights_and_buffers_are_those_of_the_library(tmp_path: Path, family: str) -> None:
    assert differences(model_folder(tmp_path, family), torch.bfloat16) == []


def anonymous_bytes() -> int:
    """Memory of this process apart from pages of files, which the system may drop."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that was taken beside that before, by looks every two milliseconds."""
    before, most, ended = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            most.append(anonymous_bytes())

    looking = threading.Thread(target=look)
    looking.start()
    held = work()
    ended.set()
    looking.join()
    del held
    return max(most) - before


def measured(rank: int, folder: Path, work: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{work}/rendezvous", rank=rank, world_size=2)

    def sharded(load: Callable[..., torch.nn.Module]) -> object:
        model = load(folder, torch.float32)
        shard_model(model, torch.float32, 2, CPU)
        fill(model, folder, CPU)
        return model

    sharded(lambda *_: load_causal_lm(work / "small", torch.float32))  # what the first time takes
    report = [peak_bytes(lambda load=load: sharded(load)) for load in (load_outline, load_causal_lm)]  # type: ignore[misc]
    (work / f"bytes-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


@pytest.mark.proof
def test_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    """103 million parameters, in bfloat16, over two ranks."""
    sizes = {**SIZES, "vocab_size": 100_000, "hidden_size": 512, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **GROUPED, tie_word_embeddings=False)).bfloat16()
    parameters = model.num_parameters()
    model.save_pretrained(tmp_path / "model")
    model_folder(tmp_path / "small")
    del model
    run_ranks(measured, tmp_path / "model", tmp_path, world_size=2)
    for rank in range(2):
        outline, whole_model = json.loads((tmp_path / f"bytes-{rank}.json").read_text())
        print(f"rank {rank}, {parameters} parameters: {outline} bytes by shards, {whole_model} by the library")
        assert outline < 3 * parameters < 4 * parameters < whole_model
