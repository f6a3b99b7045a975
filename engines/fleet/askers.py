"""Streams of a rollout engine for whoever asks it from another process: the workers in which episodes run.

An asker submits what came up since its last call, and takes what has ended since. A thread reads its stream meanwhile,
so that the engine decodes however long an asker takes to come again.
"""

import threading
from collections.abc import Callable, Sequence

from cairn.engines.episodes.asking import Answers, Asking
from cairn.engines.errors import EngineError
from cairn.engines.rollout.streams import Stream
from cairn.engines.types import GenerateRequest


class Askers:
    """Of the engine in this process. Methods may be called from any thread."""

    def __init__(self, open: Callable[[], Stream]) -> None:
        """`open`: opens a stream of the engine."""
        self._open = open
        self._askers: dict[str, _Asker] = {}
        self._lock = threading.Lock()

    def open_stream(self, name: str) -> None:
        """Begin to be asked by someone, named unlike all others that there are or were."""
        with self._lock:
            self._askers[name] = _Asker(self._open())

    def ask(self, name: str, requests: Sequence[GenerateRequest]) -> None:
        """Generate a sample for each request. What is refused is told as an answer, and so is whatever fails. Raises
        EngineError where the stream is closed."""
        self._asker(name).ask(requests)

    def take_answers(self, name: str, seconds: float) -> Answers:
        """What has been answered since; nothing where nothing was for so many seconds. Raises what streams do."""
        return self._asker(name).take(seconds)

    def abort_stream(self, name: str) -> None:
        """End what one has asked for soon; without effect where it is gone."""
        with self._lock:
            asker = self._askers.get(name)
        if asker is not None:
            asker.stream.abort()

    def close_stream(self, name: str) -> None:
        """Give up what one has asked for; the engine is at work on none of it when this returns."""
        with self._lock:
            asker = self._askers.pop(name, None)
        if asker is not None:
            asker.close()

    def close_streams(self) -> None:
        """The same for all."""
        for name in list(self._askers):
            self.close_stream(name)

    def _asker(self, name: str) -> "_Asker":
        with self._lock:
            asker = self._askers.get(name)
        if asker is None:
            raise EngineError(f"the engine is asked for more by {name}, whose stream is closed")
        return asker


class _Asker:
    """One of them, and what it has not taken yet."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self._asking = Asking(stream)
        self._changed = threading.Condition()
        self._answers: Answers = []
        self._error: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="asker", daemon=True)
        self._thread.start()

    def ask(self, requests: Sequence[GenerateRequest]) -> None:
        self._told(self._asking.submit(requests))

    def take(self, seconds: float) -> Answers:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._error or self._closed, seconds)
            answers, self._answers = self._answers, []
            if not answers and self._error is not None:
                raise self._error
            if not answers and self._closed:
                raise EngineError("the stream was closed")
            return answers

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._asking.end()
        self.stream.close()
        self._thread.join()

    def _read(self) -> None:
        """In a thread of its own."""
        try:
            while self._asking.wait():
                self._told(self._asking.answers())
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _told(self, answers: Answers) -> None:
        if answers:
            with self._changed:
                self._answers += answers
                self._changed.notify_all()
