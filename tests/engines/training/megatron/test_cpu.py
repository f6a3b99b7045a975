"""megatron-core without CUDA, whatever else the process has imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from cairn.engines.training.megatron import cpu

SEED_AFTER_BEARTYPE = """
from beartype.claw import beartype_packages
beartype_packages("nothing_of_this_name")
from cairn.engines.training.megatron import cpu
cpu.install()
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
"""


def test_a_process_whose_modules_beartype_loads_can_still_use_it_without_cuda() -> None:
    """Prefect's server imports beartype, which from then on loads every module with a loader of its own."""
    done = subprocess.run([sys.executable, "-c", SEED_AFTER_BEARTYPE], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_the_changed_source_is_compiled_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    parsed, file = cpu.parsed, tmp_path / "named.py"
    monkeypatch.setattr(cpu, "parsed", lambda *source: compiled.append(source) or parsed(*source))
    file.write_text("device = torch.device('cuda', 3)")
    first, again = (cpu._Loader("named", str(file)).get_code("named") for _ in range(2))
    assert (again, len(compiled)) == (first, 1)
    assert {"cpu"} <= set(first.co_consts)
    file.write_text("device = torch.device('cuda', 4), 1")
    changed = cpu._Loader("named", str(file)).get_code("named")
    assert (changed != first, len(compiled)) == (True, 2)
    (kept,) = tmp_path.rglob("*.pyc")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert cpu._Loader("named", str(file)).get_code("named") == changed
    assert len(compiled) == 3
