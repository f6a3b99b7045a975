"""The quickstart under `cairn train` with every tracker on, read by the reader of each."""

import json
import socket
import sys
from pathlib import Path

import httpx
import pytest
from mlflow.tracking import MlflowClient
from prometheus_client.parser import text_string_to_metric_families

from cairn.flows.reading.metrics import find_metric, iteration_metrics
from cairn.storage.ledger.ledger import Ledger
from cairn.storage.opening import open_store
from tests.background import in_background
from tests.flows.watching.trackers.test_trackers import shown
from tests.flows.watching.trackers.test_wandb_mlflow import rows_in_wandb
from tests.flows.written_runs import config_of
from tests.waiting import wait_for

RECIPE = Path(__file__).resolve().parents[2] / "configs" / "recipes" / "quickstart.yaml"
CAIRN = Path(sys.executable).with_name("cairn")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.slow
def test_every_tracker_shows_what_the_ledger_holds(root: Path) -> None:
    port = free_port()
    options = {
        "rollout.num_rollout": 2,
        "eval.eval_interval": 2,
        "tracking.use_wandb": True,
        "tracking.wandb_mode": "offline",
        "tracking.use_mlflow": True,
        "tracking.prometheus_port": port,
        "tracking.peak_tflops": 1.0,
        "tracking.alarms": {"window": 1, "reward": {"below": 1.1}},
    }
    given = [part for name, value in options.items() for part in ("--set", f"{name}={json.dumps(value)}")]
    home = {name: str(root / "home") for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")}
    home["WANDB_SERVICE"] = ""  # W&B's own process, and not that of a test before, which would write when it ends
    with in_background(CAIRN, "train", RECIPE, "--run", "tracked", *given, cwd=root, **home) as driver:

        def exported() -> dict[str, float] | None:
            assert driver.poll() is None, driver.communicate(10)
            try:
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
            except httpx.TransportError:
                return None
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            found = {sample.labels.get("name", sample.name): sample.value for sample in samples}
            return found if "cairn_iteration" in found else None

        scraped = wait_for(exported, 120)
        said, _ = driver.communicate(120)
        assert driver.returncode == 0, said
    assert "Alarm in iteration 0: reward" in said
    assert "is off" not in said

    ledger = Ledger.open(open_store(str(root)), "tracked")
    expected = [iteration_metrics(ledger.commits(index), config_of(ledger)) for index in range(2)]
    assert 0 < expected[1]["perf/mfu"] < 1
    done = int(scraped["cairn_iteration"])
    assert {name: scraped[name] for name in expected[done]} == pytest.approx(expected[done])

    steps = shown(root / "tensorboard" / "tracked")
    assert all(steps[name] == [0, 1] for name in ("train/loss", "perf/mfu", "alarm/reward"))
    assert steps["eval/heldout"] == [0, 2]
    assert [name for name in steps if find_metric(name) is None] == []

    def in_wandb() -> dict[int, dict] | None:
        """W&B's own process writes the file, and may end after the driver."""
        found = {row["iteration"]: row for row in rows_in_wandb(root) if "iteration" in row}
        return found if len(found) == len(expected) else None

    rows = wait_for(in_wandb)
    client = MlflowClient(tracking_uri=f"sqlite:///{root / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("cairn")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    for index, metrics in enumerate(expected):
        assert {name: rows[index][name] for name in metrics} == pytest.approx(metrics)
        for name in ("rollout/raw_reward", "train/loss", "perf/step_time"):
            assert client.get_metric_history(run.info.run_id, name)[index].value == pytest.approx(metrics[name])
