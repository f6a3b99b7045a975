"""Real rows, a tiny model, and the ledger on an S3 server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cairn.flows.cli import app

CAIRN = Path(sys.executable).with_name("cairn")
ROOT = Path(__file__).parents[2]
ROWS = ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not ROWS.exists(), reason=f"GSM8K is not part of the project; put its train.jsonl at {ROWS}")
def test_the_gsm8k_recipe_runs_on_all_rows_with_its_ledger_on_s3(
    s3_url: str, tiny_assets: Path, tmp_path: Path, api_url: str
) -> None:
    def cairn(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--store", s3_url])
        assert done.exit_code == 0, done.stderr
        return done.stdout

    sizes = ("rollout.rollout_batch_size=4", "rollout.rollout_max_response_len=16", "rollout.num_engines=1")
    changes = (f"data.path={ROWS}", f"model.path={tiny_assets / 'model'}", *sizes)
    settings = [word for change in changes for word in ("--set", change)]
    command = [CAIRN, "train", ROOT / "configs/recipes/gsm8k-tiny.yaml", "--run", "gsm8k", "--store", s3_url, *settings]
    environment = os.environ | {"PREFECT_API_URL": api_url}
    trained = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert trained.returncode == 0, trained.stderr

    status = json.loads(cairn("status", "gsm8k", "--json"))
    assert (status["state"], status["iterations"], status["weight_version"]) == ("completed", 3, 3)
    answers = {row["question"]: row["answer"].rpartition("#### ")[2] for row in map(json.loads, ROWS.open())}
    assert len(answers) > 7000
    samples = json.loads(cairn("show", "gsm8k@2", "--limit", "16", "--json"))
    assert len(samples) == 16
    for sample in samples:
        question = sample["prompt"].partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        assert sample["label"] == answers[question]
    cairn("verify", "gsm8k")
    assert not (tmp_path / "runs").exists()
