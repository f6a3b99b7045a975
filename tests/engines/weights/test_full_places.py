"""Weights that find no room on their way: the place is named, whatever library wrote there."""

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.engines.training.weight_source import WeightSource
from cairn.storage.store.errors import NoSpace
from tests.engines.training.builders import make_engine, model_folder
from tests.small_disk import on_small_disks, small_disk, why_not

if reason := why_not():
    pytest.skip(reason, allow_module_level=True)


class Source(WeightSource):
    """What an actor is, without Ray."""

    def __init__(self, model: Path) -> None:
        self._engine = make_engine(model)

    _started = property(lambda self: self._engine)  # type: ignore[assignment]


def test_a_model_folder_that_does_not_fit_is_named(tmp_path: Path) -> None:
    source = Source(model_folder(tmp_path / "model"))
    with small_disk(tmp_path / "disk", 2**17) as disk:
        with pytest.raises(NoSpace, match=f"cannot write to {disk}/weight_v000000: no space is left there; free some"):
            source.export_hf(0, disk / "weight_v000000")
        source.keep_folders(disk, ["weight_v000001"])
        assert not list(disk.iterdir())


SHARING = """
import torch
from cairn.engines.weights.buckets import share
share({"weight": torch.ones(2**20)})
"""


@pytest.mark.proof
def test_shared_memory_that_is_full_is_named(tmp_path: Path) -> None:
    command = [*on_small_disks({Path("/dev/shm"): 2**20}), sys.executable, "-c", SHARING]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=Path(__file__).parents[3])
    assert "NoSpace: cannot write to /dev/shm: no space is left there; free some" in result.stderr
