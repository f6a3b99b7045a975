import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.training.builders import model_folder

pytestmark = pytest.mark.timeout(900)


@pytest.mark.proof
def test_updates_resumed_by_a_fresh_process_end_bitwise_where_uninterrupted_ones_do(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")

    def digests(mode: str, end: int) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "tests.engines.training.resume_process",
            mode,
            str(model),
            str(tmp_path / "store"),
        ]
        # Threads that spin while they wait are slow beyond measure on a busy machine.
        environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
        assert done.returncode == end, done.stderr
        return done.stdout.split()

    straight = digests("straight", -signal.SIGKILL)
    assert len(straight) == 4
    assert digests("resumed", 0) == straight
