"""An evaluation that a Prefect server starts by itself, by schedule, on rows of GSM8K and AIME."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for

DATA = next((folder / "shared/data" for folder in Path(__file__).parents if (folder / "shared/data").is_dir()), None)

SERVE = """
from datetime import timedelta

from prefect.deployments.runner import EntrypointType

from cairn.flows.deployments.flows import evaluate

if __name__ == "__main__":
    evaluate.serve(
        name="nightly",
        interval=timedelta(seconds=10),
        limit=1,
        parameters={parameters!r},
        entrypoint_type=EntrypointType.MODULE_PATH,
        pause_on_shutdown=True,
        print_starting_message=False,
    )
"""


@pytest.mark.slow
@pytest.mark.skipif(
    DATA is None, reason="the rows of GSM8K and AIME are not part of the project: put them in shared/data"
)
def test_a_schedule_fires_by_itself_and_the_second_time_computes_nothing(
    tiny_assets: Path, api_url: str, tmp_path: Path
) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey, DeploymentFilter, DeploymentFilterName
    from prefect.settings import PREFECT_API_URL, temporary_settings

    parameters = {
        "benchmarks": ["gsm8k", "aime2024"],
        "model": str(tiny_assets / "model"),
        "store": str(tmp_path / "store"),
        "data": [f"gsm8k={DATA}/gsm8k/test.jsonl@[0:8]", f"aime2024={DATA}/aime24/test.jsonl@[0:4]"],
        "sampling": {"n": 1, "max_tokens": 8},
    }
    (tmp_path / "serve.py").write_text(textwrap.dedent(SERVE.format(parameters=parameters)))
    environment = {**os.environ, "PREFECT_API_URL": api_url, "PREFECT_RUNNER_POLL_FREQUENCY": "1"}
    with (tmp_path / "log").open("wb") as log:
        serving = subprocess.Popen([sys.executable, "serve.py"], cwd=tmp_path, env=environment, stdout=log, stderr=log)
    named = DeploymentFilter(name=DeploymentFilterName(any_=["nightly"]))
    try:
        with temporary_settings({PREFECT_API_URL: api_url}), get_client(sync_client=True) as client:

            def ended() -> list[Any]:
                assert serving.poll() is None, (tmp_path / "log").read_text()
                runs = client.read_flow_runs(deployment_filter=named)
                done = [run for run in runs if run.state is not None and run.state.is_final()]
                return sorted(done, key=lambda run: run.end_time or 0)

            runs = wait_for(lambda: found if len(found := ended()) >= 2 else None, seconds=200)
            artifacts = client.read_artifacts(
                artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=["evaluation-model"]))
            )
    finally:
        serving.kill()  # the server ends with the test, and the runner would wait for it
        serving.wait()
    assert [run.auto_scheduled for run in runs[:2]] == [True, True]
    messages = [run.state.message for run in runs[:2]]
    assert messages == ["2 of 2 results computed, 0 found", "0 of 2 results computed, 2 found"]
    tables = sorted(str(artifact.data) for artifact in artifacts)
    assert len(tables) >= 2
    for table in tables:
        assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["gsm8k", "aime2024"]
    assert any(table.count("| computed |") == 2 for table in tables)
    assert any(table.count("found in the store, not computed") == 2 for table in tables)
