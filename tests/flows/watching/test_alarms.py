"""Alarms follow their rules, told once; closed forms."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.events import Event
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from cairn.configs.schema.operations import AlarmRule, AlarmsConfig
from cairn.flows.events import IterationDone
from cairn.flows.watching import alarms as module
from cairn.flows.watching.alarms import Alarms, MetricHistory, alarms, raised
from cairn.storage.ledger.commits import Step
from cairn.storage.ledger.ledger import Ledger
from cairn.tasks.durable.events import Message
from tests.flows.written_runs import config_of, new_run, write_run
from tests.waiting import wait_for


@pytest.mark.parametrize(
    ("values", "rule", "window", "expected"),
    [
        ([0.5, 0.1, 0.1], AlarmRule(below=0.2), 2, "0.1 is below 0.2"),
        ([0.5, 0.1, 0.3], AlarmRule(below=0.2), 2, None),  # a mean of exactly 0.2
        ([0.1], AlarmRule(below=0.2), 2, None),  # too few
        ([1, 5, 7], AlarmRule(above=5.5), 2, "6 is above 5.5"),
        ([4, 4, 1, 1], AlarmRule(fall=0.7), 2, "1 has fallen from 4"),
        ([4, 4, 1, 1], AlarmRule(fall=0.75), 2, None),  # by exactly three quarters
        ([4, 1, 1], AlarmRule(fall=0.1), 2, None),  # too few
        ([2, 2, 5, 5], AlarmRule(rise=1), 2, "5 has risen from 2"),
        ([-1, -1, -4, -4], AlarmRule(fall=2), 2, "-4 has fallen from -1"),
        ([9, 9, 4, 4, 1, 1], AlarmRule(fall=0.8), 2, None),  # the windows before the last two are history
    ],
)
def test_a_rule_is_held_against_the_means_of_its_windows(
    values: list[float], rule: AlarmRule, window: int, expected: str | None
) -> None:
    assert raised(values, rule, window) == expected


def test_an_alarm_reads_the_first_of_its_metrics_that_is_there() -> None:
    config = AlarmsConfig(window=1, kl=AlarmRule(above=1), reward=AlarmRule(below=0))
    assert alarms([{"train/ppo_kl": 2.0, "rollout/kl": 0.5}], config) == {"kl": None}
    assert alarms([{"train/ppo_kl": 2.0, "rollout/raw_reward": 1.0}], config) == {"kl": "2 is above 1", "reward": None}


def test_without_rules_there_are_none() -> None:
    assert alarms([{"rollout/raw_reward": -1e9, "train/entropy_loss": 0.0}], AlarmsConfig()) == {}


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A run whose reward is 2/3 throughout."""
    rules = {"window": 1, "reward": {"below": 0.7}, "entropy": {"below": 1.0}}
    ledger = new_run(str(tmp_path), tracking={"tensorboard_dir": None, "alarms": rules})
    write_run(ledger, 3)
    return ledger


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, object]]]:
    found: list[tuple[str, object]] = []

    def emit(run: str, name: str, payload: dict[str, object]) -> None:
        found.append((f"{run}.{name}", payload["iteration"]))
        raise ConnectionError("no server")

    monkeypatch.setattr(module, "emit_alarm", emit)
    return found


def messages_of(ledger: Ledger, iterations: range) -> list[str]:
    said: list[Message] = []
    watcher = Alarms(ledger, config_of(ledger), said.append)
    for iteration in iterations:
        watcher(IterationDone(iteration, tuple(ledger.commits(iteration))))
    return [message.text for message in said]


def test_an_alarm_is_told_when_it_is_raised_and_not_again_after_a_restart(
    ledger: Ledger, sent: list[tuple[str, object]]
) -> None:
    assert messages_of(ledger, range(3)) == ["Alarm in iteration 0: reward 0.6667 is below 0.7"]
    assert sent == [("toy.reward", 0)]
    assert messages_of(ledger, range(1, 3)) == []


def test_metrics_say_which_alarms_are_raised(ledger: Ledger) -> None:
    history = MetricHistory(ledger, config_of(ledger))
    assert history.metrics(2, ledger.commits(2))["alarm/reward"] == 1.0
    assert "alarm/entropy" not in history.metrics(2, ledger.commits(2)), "the run has no such metric"


def test_windows_reach_back_into_the_ledger(tmp_path: Path) -> None:
    rules = {"window": 2, "response_length": {"fall": 0.5}}
    ledger = new_run(str(tmp_path), rollout={"num_rollout": 4}, tracking={"tensorboard_dir": None, "alarms": rules})
    write_run(ledger, 4)
    config = config_of(ledger)
    whole = MetricHistory(ledger, config).metrics(3, ledger.commits(3))
    assert whole["alarm/response_length"] == 0.0
    shorter = [
        commit.model_copy(update={"metrics": {**commit.metrics, "response_len/mean": -1.0}})
        if commit.step is Step.ADVANTAGE
        else commit
        for commit in ledger.commits(3)
    ]
    # Of the means 2.5, 2.5 and 2.5, -1 the second is 0.75: a fall by 0.7.
    assert MetricHistory(ledger, config).metrics(3, shorter)["alarm/response_length"] == 1.0


def test_prefect_gets_an_event_that_names_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[Event] = []

    async def keep(client: AssertingEventsClient, event: Event) -> None:
        emitted.append(event)

    monkeypatch.setattr(AssertingEventsClient, "_emit", keep)
    EventsWorker.set_client_override(AssertingEventsClient)
    try:
        with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
            module.emit_alarm("toy", "reward", {"iteration": 3, "why": "0 is below 1"})
            (event,) = wait_for(lambda: emitted, 30)
    finally:
        EventsWorker.set_client_override(None)
    assert event.event == "cairn.alarm.reward"
    assert event.resource["prefect.resource.id"] == "cairn.run.toy"
    assert event.payload == {"iteration": 3, "why": "0 is below 1"}
