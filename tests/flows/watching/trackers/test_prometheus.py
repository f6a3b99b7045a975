"""Prometheus is told what the run does, and the dashboard asks for nothing else."""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.configs.errors import ConfigError
from cairn.flows.events import IterationDone, RunStarted
from cairn.flows.reading.metrics import find_metric
from cairn.flows.watching.trackers.prometheus import FAMILIES, Prometheus
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import StepCommitted, StepStarted
from tests.flows.written_runs import config_of, new_run, write_run

DASHBOARD = json.loads((Path(__file__).parents[4] / "docs" / "grafana.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    rules = {"window": 1, "reward": {"below": 0.7}}
    ledger = new_run(str(tmp_path), tracking={"tensorboard_dir": None, "alarms": rules})
    write_run(ledger, 3)
    return ledger


@pytest.fixture
def watcher(ledger: Ledger) -> Iterator[Prometheus]:
    watcher = Prometheus(ledger, config_of(ledger), "127.0.0.1", 0)
    yield watcher
    watcher.close()


def scraped(watcher: Prometheus) -> dict[tuple[str, ...], float]:
    """Every sample, by its name and labels but the run's."""
    text = httpx.get(f"http://127.0.0.1:{watcher.port}/metrics", trust_env=False).raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == "toy"
            if not sample.name.endswith("_created"):
                found[sample.name, *labels.values()] = sample.value
    return found


def drive(watcher: Prometheus, ledger: Ledger) -> None:
    watcher(RunStarted("toy", 1, 2, 3))
    commits = tuple(ledger.commits(2))
    for commit in commits:
        watcher(StepStarted(2, commit.step, commit.shard))
        watcher(StepCommitted(commit))
    watcher(IterationDone(2, commits))


def test_a_run_is_told_as_it_goes(watcher: Prometheus, ledger: Ledger) -> None:
    watcher(RunStarted("toy", 1, 2, 3))
    before = scraped(watcher)
    assert (before["cairn_iteration",], before["cairn_iterations",], before["cairn_score", "heldout"]) == (1, 3, 0.75)
    watcher(StepStarted(2, Step.ROLLOUT, "00-000"))
    watcher(StepStarted(2, Step.ROLLOUT, "00-000"))  # tried again
    watcher(StepStarted(2, Step.ROLLOUT, "00-001"))
    assert scraped(watcher)["cairn_working", "rollout"] == 2
    drive(watcher, ledger)
    after = scraped(watcher)
    assert after["cairn_iteration",] == 2
    assert after["cairn_working", "rollout"] == 0
    assert after["cairn_reward",] == pytest.approx(2 / 3)
    assert after["cairn_alarm", "reward"] == 1
    assert after["cairn_score", "heldout"] == 1.0
    assert after["cairn_metric", "train/grad_norm"] == 2.0
    assert after["cairn_commits_total", "rollout"] == 2
    assert (after["cairn_generated_tokens_total",], after["cairn_trained_tokens_total",]) == (18, 28)


def test_after_a_resume_the_newest_score_is_that_of_whichever_iteration_had_an_evaluation(tmp_path: Path) -> None:
    ledger = new_run(str(tmp_path), rollout={"num_rollout": 4})
    write_run(ledger, 3)  # by its interval of two, the second iteration was the last that was evaluated
    watcher = Prometheus(ledger, config_of(ledger), "127.0.0.1", 0)
    watcher(RunStarted("toy", 1, 3, 4))
    assert scraped(watcher)["cairn_score", "heldout"] == 0.75
    watcher.close()


def test_every_query_of_the_dashboard_names_a_metric_that_is_exported(watcher: Prometheus, ledger: Ledger) -> None:
    drive(watcher, ledger)
    text = httpx.get(f"http://127.0.0.1:{watcher.port}/metrics", trust_env=False).text
    declared = set(re.findall(r"^# TYPE (cairn_\w+)", text, re.MULTILINE)) - {"cairn_commits_created"}
    assert {name for name in declared if not name.endswith("_created")} == FAMILIES
    responses = {name for query in QUERIES for name in re.findall(r"cairn_\w+", query)}
    assert responses
    assert responses <= FAMILIES
    assert {*re.findall(r"cairn_\w+", json.dumps(DASHBOARD["templating"]))} <= FAMILIES


def test_every_metric_by_name_that_the_dashboard_asks_for_is_documented() -> None:
    names = {name for query in QUERIES for name in re.findall(r'name="([^"]+)"', query)}
    assert names
    assert [name for name in names if find_metric(name) is None] == []


def test_a_port_that_is_taken_is_one_clear_sentence(ledger: Ledger) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"tracking\.prometheus_port is {port}, which is not usable"):
            Prometheus(ledger, config_of(ledger), "127.0.0.1", port)
