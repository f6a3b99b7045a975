"""Whoever watches a run sees all of it in order, and can neither end it nor slow it."""

import threading
from collections.abc import Callable
from contextvars import ContextVar

import pytest

from cairn.flows.events import Event, RunStarted
from cairn.flows.watching import watchers
from cairn.flows.watching.watchers import Watchers
from cairn.storage.ledger.commits import Step
from cairn.tasks.durable.events import Message, StepStarted

STARTED = RunStarted("toy", 1, 0, 3)
BLOCKED = 20.0
"""Seconds after which a test that would wait for ever fails."""


class Recorder:
    """Notes what it is told, after `first` was done to it."""

    def __init__(self, first: Callable[[], None] = lambda: None) -> None:
        self.seen: list[Event | str] = []
        self._first = first

    def __call__(self, event: Event) -> None:
        self._first()
        self.seen.append(event)

    def close(self) -> None:
        self.seen.append("closed")

    def stop(self) -> None:
        self.seen.append("stopped")


def started(iteration: int) -> StepStarted:
    return StepStarted(iteration, Step.ROLLOUT)


def holding() -> tuple[threading.Event, threading.Event, Callable[[], None]]:
    """Return two events and a function that sets the first and waits for the second."""
    entered, proceed = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        assert proceed.wait(BLOCKED)

    return entered, proceed, hold


def broken() -> None:
    raise ConnectionError("no route to host")


@pytest.fixture
def terminal() -> list[Event]:
    """What the person at the terminal is told."""
    return []


def test_all_are_told_all_in_order_and_then_closed(terminal: list[Event]) -> None:
    one, other = Recorder(), Recorder()
    emit = Watchers(terminal.append)
    with emit.attached({"one": one, "other": other}):
        events = [STARTED, *map(started, range(100))]
        for event in events:
            emit(event)
    assert one.seen == other.seen == [*events, "closed"]
    assert terminal == events


def test_a_run_that_fails_stops_them_without_the_rest(terminal: list[Event]) -> None:
    entered, proceed, hold = holding()
    slow, emit = Recorder(hold), Watchers(terminal.append)

    def failing() -> None:
        with emit.attached({"slow": slow}):
            emit(STARTED)
            assert entered.wait(BLOCKED)
            emit(started(0))
            threading.Timer(0.05, proceed.set).start()
            raise ValueError("of the run")

    with pytest.raises(ValueError, match="of the run"):
        failing()
    assert slow.seen == [STARTED, "stopped"]


def test_one_that_fails_is_told_once_and_hears_nothing_more(terminal: list[Event]) -> None:
    bad, good = Recorder(broken), Recorder()
    emit = Watchers(terminal.append)
    with emit.attached({"The board": bad, "good": good}):
        emit(STARTED)
        emit.settle()
        emit(started(0))
    (warning,) = [event for event in terminal if isinstance(event, Message)]
    assert warning.level == "warning"
    assert warning.text == "The board is off for the rest of this driver: no route to host. The run continues"
    assert bad.seen == ["stopped"]
    assert good.seen == [STARTED, warning, started(0), "closed"]


def test_one_that_hangs_holds_up_neither_events_nor_the_end_for_long(
    terminal: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchers, "CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(watchers, "QUEUE", 10)
    proceed = threading.Event()
    hanging, emit = Recorder(lambda: bool(proceed.wait(BLOCKED)) or None), Watchers(terminal.append)
    with emit.attached({"The board": hanging}):
        for iteration in range(50):
            emit(started(iteration))
    proceed.set()
    assert isinstance(terminal[-1], Message)
    assert "The board did not finish" in terminal[-1].text


def test_of_more_events_than_are_kept_the_newest_stay(terminal: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchers, "QUEUE", 10)
    entered, proceed, hold = holding()
    slow, emit = Recorder(hold), Watchers(terminal.append)
    with emit.attached({"slow": slow}):
        emit(STARTED)
        assert entered.wait(BLOCKED)
        for iteration in range(50):
            emit(started(iteration))
        proceed.set()
    assert slow.seen == [STARTED, *map(started, range(40, 50)), "closed"]


def test_an_event_is_handled_in_the_context_of_who_told_it(terminal: list[Event]) -> None:
    flow: ContextVar[str] = ContextVar("flow")
    seen = []
    emit = Watchers(terminal.append)
    with emit.attached({"one": Recorder(lambda: seen.append(flow.get()))}):
        for name in ("train", "iteration"):
            flow.set(name)
            emit(STARTED)
    assert seen == ["train", "iteration"]
