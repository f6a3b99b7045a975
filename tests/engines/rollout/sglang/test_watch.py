"""When a server counts as hung: against a small HTTP server that answers when the test lets it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cairn.engines.rollout.sglang.server import PROBE_PATH, Watch
from tests.waiting import wait_for


@contextmanager
def watched(
    answer: Callable[[int], None], least: float, paused: bool = False, first_wait: float = 0
) -> Iterator[tuple[Watch, list[str]]]:
    """A watch over a server that calls `answer` with the number of each question before it answers; what it says."""
    requested: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            answer(len(requested))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    said: list[str] = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        watch = Watch(f"http://127.0.0.1:{server.server_port}", 0.05, least, said.append, first_wait=first_wait)
        if paused:
            watch.pause()
        try:
            yield watch, said
        finally:
            watch.end()
            server.shutdown()
    assert set(requested) <= {PROBE_PATH}


def test_silence_is_told_once_and_not_within_a_pause() -> None:
    with watched(lambda _: time.sleep(60), least=0.5, paused=True) as (watch, said):
        time.sleep(1)
        assert said == []
        watch.resume()
        wait_for(lambda: said)
    assert len(said) == 1
    assert "SGLang server" in said[0]
    assert "did not answer for 0.5 s" in said[0]


@pytest.mark.proof
def test_a_server_that_is_still_compiling_is_not_asked() -> None:
    began = time.monotonic()
    with watched(lambda _: time.sleep(60), least=0.3, first_wait=0.5) as (_, said):
        wait_for(lambda: said)
    assert time.monotonic() - began > 0.8


@pytest.mark.slow
def test_a_second_question_may_be_answered_where_the_first_was_not() -> None:
    with watched(lambda number: time.sleep(60 if number == 1 else 0), least=3) as (watch, said):
        wait_for(lambda: len(watch._seconds) > 3)
        assert said == []


@pytest.mark.slow
def test_a_server_that_is_always_slow_gets_three_times_as_long() -> None:
    with watched(lambda _: time.sleep(1.5), least=4) as (watch, said):
        wait_for(lambda: watch.limit > 4)
        assert 4.5 <= watch.limit == 3 * max(watch._seconds)
        assert said == []


def test_an_answer_that_waited_for_a_pause_says_nothing_of_the_servers_speed() -> None:
    requested, gates = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]

    def wait(number: int) -> None:
        index = min(number, 2) - 1
        requested[index].set()
        gates[index].wait(60)

    with watched(wait, least=300) as (watch, _):
        assert requested[0].wait(60)
        watch.pause()
        watch.resume()
        gates[0].set()
        assert requested[1].wait(60), "the first answer has come"
        assert list(watch._seconds) == []
        gates[1].set()
        wait_for(lambda: watch._seconds)
