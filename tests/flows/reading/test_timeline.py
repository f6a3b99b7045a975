"""An iteration's trace has each commit where and when it was made, and nothing that a viewer cannot lay out."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cairn.flows.cli import app
from cairn.flows.reading.timeline import trace
from cairn.storage.ledger.commits import Commit
from cairn.storage.ledger.ledger import Ledger
from tests.flows.written_runs import config_of, write_iteration


def slices(made: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    """(name, begin, end) in seconds, by row."""
    names = {e["pid"]: e["args"]["name"] for e in made["traceEvents"] if e["name"] == "process_name"}
    found: dict[str, list[tuple[str, float, float]]] = {name: [] for name in names.values()}
    for event in made["traceEvents"]:
        if event["ph"] == "X":
            begin = event["ts"] / 1e6
            found[names[event["pid"]]].append((event["name"], begin, begin + event["dur"] / 1e6))
    return found


def test_every_commit_is_a_slice_in_the_row_of_what_made_it(ledger: Ledger, commits: list[Commit]) -> None:
    found = slices(trace(commits, ledger.config_of))
    assert list(found) == ["rollout engine 0", "rollout engine 1", "trainer", "driver and graders"]
    evaluated = ("eval.heldout-v000000", 0, 4)
    assert found["rollout engine 0"] == [evaluated, ("rollout.00-000", 4, 10)]
    assert found["rollout engine 1"] == [evaluated, ("rollout.00-001", 4, 7)]
    assert found["trainer"] == [("train", 14, 19), ("sync", 20, 22)]
    graded = [("reward.00-000", 10, 11), ("reward.00-001", 10, 11)]
    assert sorted(found["driver and graders"]) == sorted([*graded, ("filter.00", 11, 12), ("advantage", 12, 13)])


def test_new_tries_and_the_parts_of_a_step_are_slices(ledger: Ledger, commits: list[Commit]) -> None:
    (train,) = (commit for commit in commits if commit.step == "train")
    tried = train.model_copy(
        update={
            "metrics": {"retries/engine_died": 2},
            "timings": {"failed_tries": 3.0, "retry_wait": 1.0, "run": 4.0, "write": 0.5},
        }
    )
    made = trace([*commits, tried.model_copy(update={"shard": "again"})], ledger.config_of)
    found = slices(made)["trainer"]
    assert ("train: failed tries and waits", 10, 14) in found
    assert {("run", 14, 18), ("write", 18, 18.5), ("commit", 18.5, 19)} <= set(found)
    (failed,) = [event for event in made["traceEvents"] if event.get("cat") == "retry"]
    assert failed["args"] == {"engine_died": 2}


def test_slices_of_one_lane_lie_beside_or_within_each_other(ledger: Ledger, commits: list[Commit]) -> None:
    alone = config_of(ledger).model_copy(
        update={"rollout": config_of(ledger).rollout.model_copy(update={"num_engines": 1})}
    )
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace(commits, lambda commit: alone)["traceEvents"]:
        if event["ph"] == "X":
            lanes.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert len([lane for lane in lanes if lane[0] == 1]) == 2, "two shards at a time on one engine"
    for lane in lanes.values():
        assert all(second[0] >= first[1] or second[1] <= first[1] for first, second in pairwise(sorted(lane)))


def test_the_command_writes_a_trace_and_refuses_what_is_not_there(ledger: Ledger, tmp_path: Path) -> None:
    write_iteration(ledger, 0)
    file = tmp_path / ("a-long-name-" * 15 + ".json")

    def cairn(*arguments: str) -> Any:
        return CliRunner().invoke(app, ["timeline", *arguments, "--store", str(tmp_path)])

    done = cairn("toy@0", str(file))
    assert done.exit_code == 0, done.output
    assert str(file) in done.stdout.splitlines()
    assert json.loads(file.read_text())["otherData"]["run"] == "toy"
    assert json.loads(cairn("toy", str(file), "--json").stdout)["commits"] == len(ledger.commits(0))
    missing = cairn("toy@7", str(file))
    assert missing.exit_code == 2
    assert "has no commit in iteration 7" in missing.output
    assert cairn("toy", "0", str(tmp_path / "nowhere" / "x.json")).exit_code == 2
