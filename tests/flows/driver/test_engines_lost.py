"""A run whose servers are gone and cannot be started again ends with a sentence, and goes on once they can."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from cairn.engines.rollout.sglang.installation import INTERPRETER, Installation
from tests.tiny_run import tiny_config
from tests.waiting import wait_for

CAIRN = Path(sys.executable).with_name("cairn")
REASON = "the driver of this machine's card is gone"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_without_any_server_says_why_and_resumes_when_there_is_one(
    tiny_assets: Path, tmp_path: Path, api_url: str
) -> None:
    python, broken, recipe = tmp_path / "python", tmp_path / "broken", tmp_path / "run.yaml"
    interpreter = Installation.find().python
    python.write_text(f'#!/bin/sh\n[ -e {broken} ] && {{ echo "{REASON}" >&2; exit 1; }}\nexec {interpreter} "$@"\n')
    python.chmod(0o755)
    rollout = {
        "engine": "sglang",
        "sglang": {"max_total_tokens": 4096},
        "num_rollout": 6,
        "rollout_batch_size": 4,
        "n_samples_per_prompt": 2,
        "max_running_requests": 8,
        "rollout_max_response_len": 16,
    }
    config = tiny_config(tiny_assets, rollout=rollout, fleet={"start_timeout": 300}, retry={"retries": 1})
    recipe.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = os.environ | {INTERPRETER: str(python), "PREFECT_API_URL": api_url}
    options = {"cwd": tmp_path, "env": environment, "text": True}

    said = tmp_path / "said"
    command = [CAIRN, "train", recipe, "--run", "lost"]
    with said.open("w") as output, subprocess.Popen(command, stderr=output, **options) as driver:
        try:
            first = "runs/lost/iterations/000000/shards.*.json"
            wait_for(lambda: list(tmp_path.glob(first)) or driver.poll() is not None, 400)
            assert driver.poll() is None, said.read_text()
            broken.touch()
            for process in psutil.Process(driver.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if "sglang.launch_server" in process.cmdline():
                        process.kill()
            assert driver.wait(300) != 0
        finally:
            driver.kill()
    assert REASON in said.read_text()

    broken.unlink()
    resumed = subprocess.run([CAIRN, "resume", "lost"], capture_output=True, timeout=500, **options)
    assert resumed.returncode == 0, resumed.stderr
    status = subprocess.run([CAIRN, "status", "lost", "--json"], capture_output=True, timeout=60, **options)
    assert json.loads(status.stdout)["state"] == "completed"
