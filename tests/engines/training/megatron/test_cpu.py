"""megatron-core without CUDA, whatever else the process has imported."""

import subprocess
import sys

import pytest

SEED_AFTER_BEARTYPE = """
from beartype.claw import beartype_packages
beartype_packages("nothing_of_this_name")
from cairn.engines.training.megatron import cpu
cpu.install()
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
"""


@pytest.mark.slow
def test_a_process_whose_modules_beartype_loads_can_still_use_it_without_cuda() -> None:
    """Prefect's server imports beartype, which from then on loads every module with a loader of its own."""
    done = subprocess.run([sys.executable, "-c", SEED_AFTER_BEARTYPE], capture_output=True, text=True)
    assert not done.returncode, done.stderr
