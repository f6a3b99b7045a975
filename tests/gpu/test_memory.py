"""GPU memory of a trainer that another process reads, or takes in turn. Needs neither Ray nor SGLang."""

from pathlib import Path

import pytest
import torch

from cairn.engines.weights.buckets import in_one_storage, share
from tests.engines.training.builders import make_batch, make_engine, model_folder
from tests.gpu.handles import sums_in_another_process

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_handle_shows_another_process_the_same_memory() -> None:
    tensors = in_one_storage({name: torch.full((7, 3), float(name)) for name in "123"}, torch.device("cuda"))
    assert sums_in_another_process(share(tensors)) == {"1": 21.0, "2": 42.0, "3": 63.0}


def test_an_offloaded_trainer_frees_its_memory_and_comes_back_bit_for_bit(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    plain, offloaded = (make_engine(folder, device="cuda") for _ in range(2))
    for version in range(3):
        for engine in (plain, offloaded):
            engine.train(make_batch(), num_steps=1, expected_version=version, input_digest=str(version))
        held = torch.cuda.memory_allocated()
        offloaded.offload()
        assert torch.cuda.memory_allocated() < held
        assert offloaded.position().state_digest == plain.position().state_digest
        offloaded.onload()
    assert offloaded.state_digest() == plain.state_digest()
