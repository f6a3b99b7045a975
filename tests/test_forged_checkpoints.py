"""No file of a checkpoint runs code, whatever its digests say, and whoever reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forged_checkpoints import FORGERIES

pytestmark = [pytest.mark.proof, pytest.mark.timeout(1200)]

HARMLESS = {"in_the_common_part", "in_a_plan_of_the_metadata", "as_every_object", "of_another_kind"}
"""Forgeries of what is never read."""


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=pytest.mark.slow if engine == "megatron" else ()) for engine in FORGERIES]
)
def test_a_checkpoint_runs_nothing_through_resume_replay_fork_and_convert(engine: str, tmp_path: Path) -> None:
    # Where pickles are read unless a caller says otherwise, ours say so.
    environment = {**os.environ, "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}
    command = [sys.executable, "-m", "tests.forged_checkpoints", str(tmp_path), engine]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads((tmp_path / f"{engine}.json").read_text())
    assert (report.pop("undisturbed"), report.pop("payload")) == ("done", True)
    assert set(report) == {forgery.__name__ for forgery in FORGERIES[engine]}
    assert [name for name, found in report.items() if found["ran"]] == []
    for name, found in report.items():
        for way, outcome in found["outcomes"].items():
            expected = "done" if name in HARMLESS else "Damaged: checkpoint "
            assert outcome.startswith(expected), (name, way)
    assert set(report["everywhere"]["outcomes"]) >= {"load", "resume", "replay", "fork"}
    assert all("weights_only" not in outcome for found in report.values() for outcome in found["outcomes"].values())
