import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.engines.training.builders import model_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def cairn(*arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, in which Megatron is made ready for the CPU."""
    command = [Path(sys.executable).with_name("cairn"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("convert") / "model")


def test_a_model_becomes_a_checkpoint_and_the_same_model_again(folder: Path) -> None:
    checkpoint, back = folder.parent / "checkpoint", folder.parent / "back"
    made = cairn("convert", folder, checkpoint)
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{checkpoint}: a checkpoint of {folder}\n", "")
    assert (checkpoint / "megatron_state.json").is_file()
    made = cairn("convert", checkpoint, back, "--model", folder)
    assert (made.returncode, made.stdout, made.stderr) == (0, f"{back}: a model folder of {checkpoint}\n", "")
    before, after = (load_file(path / "model.safetensors") for path in (folder, back))
    assert set(before) == set(after)
    assert all(torch.equal(after[name], weight) for name, weight in before.items())


def test_what_cannot_be_converted_is_refused_in_one_sentence(folder: Path, tmp_path: Path) -> None:
    for arguments, sentence in (
        ((tmp_path, tmp_path / "new"), "set --model"),
        ((folder, tmp_path), "exists already"),
        ((tmp_path / "nothing", tmp_path / "new"), "is not a folder"),
    ):
        done = cairn("convert", *arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
