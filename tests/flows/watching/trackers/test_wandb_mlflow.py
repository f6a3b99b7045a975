"""Weights & Biases and MLflow, really written to, hold what the ledger holds: each point once, whatever happened."""

import json
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # chosen by protobuf's version

from cairn.configs.loader import parse
from cairn.flows.driver.validation import tracking_problems
from cairn.flows.events import RunStarted
from cairn.flows.watching.trackers.tracker import Written
from cairn.flows.watching.trackers.wandb import points_before, records, run_id
from cairn.storage.ledger.ledger import Ledger
from tests.flows.watching.trackers.test_trackers import drive, tracked
from tests.flows.written_runs import RECIPE, config_of, new_run, write_run
from tests.waiting import wait_for


@pytest.fixture(autouse=True)
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of W&B's is read from, or left in, the user's folders."""
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def written_run(folder: Path, **tracking: Any) -> Ledger:
    ledger = new_run(str(folder), tracking={"tensorboard_dir": None, **tracking})
    write_run(ledger, 3)
    return ledger


def interrupted(ledger: Ledger) -> None:
    """A driver that begins at the second iteration, catches up on the first and is stopped."""
    with suppress(KeyboardInterrupt), tracked(ledger) as (report, _):
        report(RunStarted(ledger.run, 1, 1, 3))
        report.settle()
        raise KeyboardInterrupt


def rows_in_wandb(folder: Path, torn: int = 0) -> list[dict[str, float]]:
    """Of all files, the oldest first. W&B's own process writes them: but for the `torn` first they are waited for."""
    found = []
    for number, file in enumerate(sorted(folder.glob("wandb/offline-run-*/*.wandb"))):
        if number >= torn:
            wait_for(partial(is_whole, file))
        rows = [record.history.item for record in records_in(file) if record.history.item]
        found += [{"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row} for row in rows]
    return found


def is_whole(file: Path) -> bool:
    return any(record.HasField("exit") for record in records_in(file))


def records_in(file: Path) -> list[Any]:
    return [Record.FromString(record) for record in records(file.read_bytes())]


@pytest.mark.proof
def test_wandb_goes_on_with_the_same_run_and_doubles_and_loses_nothing(tmp_path: Path) -> None:
    ledger = written_run(tmp_path, use_wandb=True, wandb_mode="offline", wandb_dir=str(tmp_path / "w"))
    interrupted(ledger)
    assert [row["iteration"] for row in rows_in_wandb(tmp_path / "w") if "iteration" in row] == [0]
    for _ in range(2):  # the second finds nothing to do
        assert drive(ledger, 2, 3) == []
    rows = rows_in_wandb(tmp_path / "w")
    assert sorted(row["iteration"] for row in rows if "iteration" in row) == [0, 1, 2]
    assert sorted(row["trained"] for row in rows if "trained" in row) == [0, 2, 3]
    assert [row["_step"] for row in rows] == sorted(row["_step"] for row in rows), "W&B takes rising steps alone"
    (score,) = [row["eval/heldout"] for row in rows if row.get("trained") == 2]
    assert score == 0.75
    assert {row["train/loss"] for row in rows if "iteration" in row} == {0.1}
    assert {file.name for file in tmp_path.glob("w/wandb/offline-run-*/*.wandb")} == {
        f"run-cairn-{ledger.manifest.identity[:16]}.wandb"
    }


def test_a_wandb_file_with_a_torn_end_is_read_up_to_the_tear(tmp_path: Path) -> None:
    ledger = written_run(tmp_path, use_wandb=True, wandb_mode="offline", wandb_dir=str(tmp_path / "w"))
    assert drive(ledger, 0, 3) == []
    whole = rows_in_wandb(tmp_path / "w")
    file = next(iter(tmp_path.glob("w/wandb/offline-run-*/*.wandb")))
    data = file.read_bytes()
    file.write_bytes(data[: data.rindex(b"train/loss")])
    torn = rows_in_wandb(tmp_path / "w", torn=1)
    assert len(torn) < len(whole)
    assert drive(ledger, 3, 3) == []
    output = Counter((row.get("iteration"), row.get("trained")) for row in rows_in_wandb(tmp_path / "w", torn=1))
    assert output == Counter((row.get("iteration"), row.get("trained")) for row in whole)


def test_a_wandb_file_without_records_which_it_could_not_upload_is_removed(tmp_path: Path) -> None:
    ledger = written_run(tmp_path, use_wandb=True, wandb_mode="offline", wandb_dir=str(tmp_path / "w"))
    husks = [f"offline-run-20260101_000000-{name}" for name in (run_id(ledger), "somebody-elses")]
    for husk in husks:
        (tmp_path / "w" / "wandb" / husk).mkdir(parents=True)
        (tmp_path / "w" / "wandb" / husk / "run.wandb").write_bytes(b":W&B\xe1\xbe\x00")
    assert drive(ledger, 0, 1) == []
    assert [(tmp_path / "w" / "wandb" / husk).exists() for husk in husks] == [False, True]


def test_rows_below_the_step_at_which_wandb_goes_on_are_there() -> None:
    assert points_before(0) == Written()
    assert points_before(1) == Written(set(), {0})
    assert points_before(3) == Written({0}, {0, 1})
    assert points_before(8) == Written({0, 1}, {0, 1, 2, 3})


@pytest.mark.slow
def test_mlflow_goes_on_with_the_same_run_and_doubles_and_loses_nothing(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    ledger = written_run(tmp_path, use_mlflow=True, mlflow_tracking_uri=uri)
    interrupted(ledger)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("cairn")
    assert experiment is not None
    (begun,) = client.search_runs([experiment.experiment_id])
    assert begun.info.status == "KILLED"
    for _ in range(2):
        assert drive(ledger, 2, 3) == []
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_id, run.info.run_name, run.info.status) == (begun.info.run_id, "toy", "FINISHED")
    steps = {name: [m.step for m in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics}
    assert steps["train/loss"] == steps["rollout/raw_reward"] == [0, 1, 2]
    assert steps["eval/heldout"] == [0, 2, 3]
    score = client.get_metric_history(run.info.run_id, "eval/heldout")[1]
    assert score.value == 0.75
    assert score.timestamp == round(1000 * max(commit.committed_at for commit in ledger.commits(1)))
    assert run.data.params["rollout.num_rollout"] == "3"


def test_what_is_missing_is_said_before_a_run_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def problems(**tracking: Any) -> list[str]:
        return list(tracking_problems(parse({**RECIPE, "tracking": tracking}).tracking))

    assert problems() == problems(use_wandb=True, wandb_mode="offline", use_mlflow=True) == []
    (problem,) = problems(use_wandb=True)
    assert "set WANDB_API_KEY" in problem
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert problems(use_wandb=True) == []
    assert len(problems(use_wandb=True, wandb_host="https://wandb.example.com")) == 1
    monkeypatch.setattr("cairn.flows.driver.validation.find_spec", lambda name: None)
    assert [problem.partition(",")[0] for problem in problems(use_wandb=True, use_mlflow=True)] == [
        "tracking.use_wandb needs the extra wandb",
        "tracking.use_mlflow needs the extra mlflow",
    ]


def test_a_tracker_that_cannot_be_reached_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    ledger = written_run(tmp_path, use_mlflow=True, mlflow_tracking_uri=f"sqlite:///{tmp_path / 'file'}")
    (warning,) = drive(ledger, 0, 3)
    assert warning.startswith("MLflow is off for the rest of this driver: ")
    assert config_of(ledger).tracking.use_mlflow
