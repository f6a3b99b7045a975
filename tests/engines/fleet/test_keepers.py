"""Keepers of samples share the calls of their engine, and each of them ends for itself."""

import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from cairn.engines.fleet.keepers import Failed, Gathered, Keepers, Make, Messages
from cairn.engines.types.errors import EngineDied, EngineError, EngineTimeout
from cairn.engines.types.keeping import Finished, KeeperRefused
from tests.waiting import wait_for


class Numbers:
    """A keeper that generates numbers, and waits for an event before the last one."""

    def __init__(self, *numbers: Any, wait: threading.Event | None = None) -> None:
        self._numbers, self._wait = numbers, wait
        self.closed = 0

    def generate(self, engine: "Aborted") -> Iterator[Any]:
        for number in self._numbers:
            if self._wait is not None and number == self._numbers[-1]:
                assert self._wait.wait(10)
            if isinstance(number, Exception):
                raise number
            yield "aborted" if engine.aborted.is_set() else number

    def finish(self) -> int:
        return sum(self._numbers)

    def close(self) -> None:
        self.closed += 1


class Aborted:
    """What keepers see of an engine."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def generate(self, *_: Any) -> Any:
        raise NotImplementedError

    def abort(self) -> None:
        self.aborted.set()


def keepers(engine: Aborted | None = None) -> Keepers:
    return Keepers(engine or Aborted(), lambda: {"running": 3})


def refuses() -> Any:
    raise KeeperRefused("not here")


class Local(Exception):
    """An error that no other process can read."""

    def __init__(self, number: int, lock: Any) -> None:
        super().__init__(f"number {number}")
        self.lock = lock


def test_what_fails_in_one_keeper_ends_that_one_alone() -> None:
    made = [Numbers(1, 2), Numbers(1, EngineError("lost")), Numbers(Local(1, threading.Lock())), Numbers(5)]
    makes: list[Make] = [*(partial(lambda keeper: keeper, keeper) for keeper in made), refuses]
    messages: dict[int, list[Any]] = {place: [] for place in range(len(makes))}
    for place, message in (one for part in keepers().keep(makes) for one in part):
        messages[place].append(message)
    assert messages[0] == [1, 2, Finished(3, {"running": 3})]
    assert messages[3] == [5, Finished(5, {"running": 3})]
    ends = [messages[place][-1] for place in (1, 2, 4)]
    assert all(isinstance(end, Failed) for end in ends)
    assert [str(end.error) for end in ends] == ["lost", "Local: number 1", "not here"]
    assert isinstance(ends[2].error, KeeperRefused)
    assert "in generate" in ends[0].trace
    assert [keeper.closed for keeper in made] == [1] * 4


@pytest.mark.parametrize(
    "lost", [RuntimeError("CUDA error: unspecified launch failure"), EngineDied("no server"), EngineTimeout("silent")]
)
def test_the_loss_of_the_engine_ends_the_call_before_other_keepers_generate(lost: Exception) -> None:
    made = [Numbers(1, 2), Numbers(1, lost), Numbers(3), Numbers(4)]
    taken = list[Numbers]()

    def make(keeper: Numbers) -> Numbers:
        taken.append(keeper)
        return keeper

    messages = list[tuple[int, Any]]()
    stream = keepers().keep([partial(make, keeper) for keeper in made])
    with pytest.raises(type(lost), match=str(lost)):
        messages.extend(message for part in stream for message in part)
    assert sorted(messages, key=lambda one: one[0]) == [(0, 1), (0, 2), (0, Finished(3, {"running": 3})), (1, 1)]
    assert [keeper.closed for keeper in taken] == [1] * len(taken)


def test_keepers_of_a_replaced_driver_are_aborted_and_closed_before_another_one_goes_on() -> None:
    engine = Aborted()
    made = [Numbers(1, 2, wait=engine.aborted), Numbers(3)]
    kept = keepers(engine)
    stream = kept.keep([partial(lambda keeper: keeper, keeper) for keeper in made])
    assert next(stream) == [(0, 1)]
    kept.close_keepers()
    assert [keeper.closed for keeper in made] == [1, 1]
    rest = [message for part in stream for message in part]
    assert rest[0] == (0, "aborted")
    assert [type(message) for place, message in rest if place == 1] == [Failed]


def test_an_engine_holds_what_it_generates_and_the_keeper_before_and_after_that() -> None:
    free, made = threading.Event(), list[weakref.ref[Numbers]]()

    def make(number: int) -> Numbers:
        keeper = Numbers(number, 10, wait=free if number == 4 else None)
        made.append(weakref.ref(keeper))
        return keeper

    stream = (message for part in keepers().keep([partial(make, number) for number in range(8)]) for message in part)
    left = {(3, Finished), (4, int)}
    while left:
        place, message = next(stream)
        left.discard((place, type(message)))
    wait_for(lambda: [place for place, keeper in enumerate(made) if keeper() is not None] == [4, 5])
    assert len(made) == 6
    free.set()
    assert [message for message in stream if isinstance(message[1], Finished)][-1][0] == 7


def test_no_further_keeper_generates_once_a_driver_aborts_what_it_generates() -> None:
    engine = Aborted()
    kept = keepers(engine)
    stream = kept.keep([partial(Numbers, number, 10, wait=engine.aborted) for number in range(8)])
    assert next(stream) == [(0, 0)]
    kept.stop_keepers()
    engine.abort()
    rest = [message for part in stream for message in part]
    generated = [message for message in rest if not isinstance(message[1], Failed)]
    assert generated == [(0, "aborted"), (0, Finished(10, {"running": 3}))]


def test_keepers_that_wait_for_an_engine_share_its_next_call() -> None:
    calls, free = list[int](), threading.Event()
    engine = keepers()

    def call(makes: Sequence[Make]) -> Iterator[Messages]:
        calls.append(len(makes))
        assert free.wait(10)
        yield from engine.keep(makes)

    gathered = Gathered(call)
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(lambda n: list(gathered.keep(partial(Numbers, n))), number) for number in range(8)]
        wait_for(lambda: sum(calls) + len(gathered._waiting) == 8)
        free.set()
        results = [one.result() for one in asked]
    assert results == [[number, Finished(number, {"running": 3})] for number in range(8)]
    assert len(calls) <= 2


def test_the_loss_of_the_engine_ends_all_keepers_of_a_call_and_the_next_ones_are_called() -> None:
    engine, lost = Aborted(), iter([True, False])

    def call(makes: Sequence[Make]) -> Iterator[Messages]:
        messages = keepers(engine).keep(makes)
        yield next(messages)
        if next(lost):
            raise EngineDied("gone")
        yield from messages

    gathered = Gathered(call)
    with pytest.raises(EngineDied, match="gone"):
        list(gathered.keep(partial(Numbers, 1, 2, wait=engine.aborted)))
    engine.aborted.clear()
    assert list(gathered.keep(partial(Numbers, 3))) == [3, Finished(3, {"running": 3})]


def test_keepers_that_wait_for_an_engine_fail_with_its_loss_each_by_an_error_of_its_own() -> None:
    calls, lost = list[int](), threading.Event()

    def call(makes: Sequence[Make]) -> Iterator[Messages]:
        calls.append(len(makes))
        assert lost.wait(10)
        raise EngineDied("gone")
        yield []

    gathered = Gathered(call)
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(lambda n: list(gathered.keep(partial(Numbers, n))), number) for number in range(3)]
        wait_for(lambda: sum(calls) + len(gathered._waiting) == 3)
        lost.set()
        errors = [one.exception() for one in asked]
    assert [(type(error), str(error)) for error in errors] == [(EngineDied, "gone")] * 3
    assert len({id(error) for error in errors}) == 3  # a step is retried after its own error alone
    assert len(calls) == 1
