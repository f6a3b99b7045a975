"""A process beside the driver, in which the bodies of steps run that read many tokens.

It is a child of the driver on the same machine, with the same search path, working folder and environment. So user code
in it sees what it sees in the driver. Bodies run in threads there, as many as the driver waits for. A body may ask the
driver a question, such as for the grades of samples: graders and their limits are the driver's.

    driver ── (number, body's arguments) ──▶ process
           ◀─ (number, question)         ──             any number of times
           ── (number, answer)           ──▶
           ◀─ (number, result or error)  ──
           ◀─ a sign of life             ──             every few seconds, from a thread of its own

Where the process is lost, all of its calls raise EngineDied, and the next call starts another one. A process that sends
nothing for long, because it is stopped or hangs, is ended and counts as lost.
"""

import itertools
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Event
from typing import Any

from cairn.engines.processes.child import Child, die_with
from cairn.engines.types.errors import EngineDied, EngineError

Question = Callable[[Any], Any]
"""Function that asks the driver."""
SILENCE = 300.0
"""Seconds without a sign of life after which a process counts as stopped. Its thread for them waits while a library
converts many tokens without releasing Python's lock."""
_LOOKS = 10
"""Looks for signs of life in that time. A driver that was itself stopped misses one of them."""
_ALIVE = "alive"


@dataclass
class _Call:
    """A call that the driver waits for: its messages, None once the process is lost."""

    messages: "SimpleQueue[tuple[str, bytes] | None]" = field(default_factory=SimpleQueue)
    why: str = ""
    """Why the process was lost."""

    def next_message(self) -> tuple[str, Any] | None:
        """Return the kind of the next message and what it holds, of which nothing else is kept: a question may hold the
        text of many samples."""
        message = self.messages.get()
        return None if message is None else (message[0], pickle.loads(message[1]))


class StepProcess:
    """The process, which starts when it is first needed. Thread-safe."""

    def __init__(self, module: str, silence: float = SILENCE) -> None:
        """
        Args:
            module: its main program, see `serve`.
            silence: seconds without a sign of life after which it is ended.
        """
        self._module = module
        self._look = silence / _LOOKS
        self._numbers = itertools.count()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._child: Child | None = None
        self._calls: dict[int, _Call] = {}
        self._closed = False

    def call(self, request: Any, answer: Question) -> Any:
        """Return the result of a request. Raises what its body raises there, and what `answer` raises; EngineDied where
        the process is lost.

        Args:
            answer: called with the questions of the body.
        """
        number, call = next(self._numbers), _Call()
        child = self._begin(number, call)
        raised: Exception | None = None
        try:
            self._send(child, (number, pickle.dumps(request)))
            while (message := call.next_message()) is not None:
                kind, content = message
                if kind == "result":
                    return content
                if kind == "error":
                    raise raised or _loaded_error(*content)
                try:
                    reply = True, answer(content)
                except Exception as error:
                    raised, reply = error, (False, str(error))
                self._send(child, (number, pickle.dumps(reply)))
        finally:
            with self._lock:
                self._calls.pop(number, None)
        raise EngineDied(f"the process beside the driver, in which steps run, was lost: {call.why}")

    def close(self) -> None:
        """End the process. Calls in flight raise EngineDied."""
        with self._lock:
            self._closed, child = True, self._child
        if child is not None:
            child.kill()

    def _begin(self, number: int, call: _Call) -> Child:
        with self._lock:
            if self._closed:
                raise EngineError("the driver is ending")
            if self._child is None:
                started: SimpleQueue[Child] = SimpleQueue()
                # The process dies with the thread that starts it, so that thread reads from it, too.
                threading.Thread(target=self._run, args=(started,), name="step-process", daemon=True).start()
                self._child = started.get()
            self._calls[number] = call
            return self._child

    def _run(self, started: "SimpleQueue[Child]") -> None:
        child, signs = Child(self._module, [self._look / 2]), _Signs()
        threading.Thread(target=signs.watch, args=(child, self._look), name="step-process-watch", daemon=True).start()
        started.put(child)
        with suppress(EOFError, OSError):
            while True:
                number, kind, content = child.connection.recv()
                signs.seen.set()
                with self._lock:
                    call = self._calls.get(number)
                if call is not None:
                    call.messages.put((kind, content))
                del content, call  # as long as the next message does not come
        child.kill()
        signs.over.set()
        why = "it may have had no memory left"
        if signs.silent:
            why = "it sent no sign of life for long, as if it had been stopped, and was ended"
        with self._lock:
            self._child, lost = None, list(self._calls.values())
            self._calls.clear()
        for call in lost:
            call.why = why
            call.messages.put(None)

    def _send(self, child: Child, message: tuple[int, bytes]) -> None:
        with self._sending, suppress(OSError):  # a lost process ends the call
            child.connection.send(message)


class _Signs:
    """Signs of life of one process."""

    def __init__(self) -> None:
        self.seen, self.over = Event(), Event()
        """Whether a message has come since the last look; whether the process has ended."""
        self.silent = False
        """Whether it was ended because none came."""

    def watch(self, child: Child, look: float) -> None:
        """End the process when `_LOOKS` looks in a row, every `look` seconds, find no message. Before the first message
        it imports its modules, and has `SILENCE` seconds."""
        missed, most = 0, max(_LOOKS, round(SILENCE / look))
        while missed < most and not self.over.wait(look):
            missed += 1
            if self.seen.is_set():
                missed, most = 0, _LOOKS
            self.seen.clear()
        if not self.over.is_set():
            self.silent = True
            child.interrupt()


def serve(connection: int, parent: int, run: Callable[[Any, Question], Any], interval: float) -> None:
    """Serve the requests of a driver until it ends; the main program of the process.

    Args:
        connection: file descriptor of the connection.
        parent: id of the driver's process.
        run: executes a request, with the function that asks the driver.
        interval: seconds between two signs of life.
    """
    die_with(parent)
    with Connection(connection) as driver:
        lock, answers = threading.Lock(), dict[int, SimpleQueue[bytes]]()

        def send(number: int, kind: str, content: bytes) -> None:
            with lock:
                driver.send((number, kind, content))

        def live() -> None:
            with suppress(OSError):  # the driver has ended
                while True:
                    send(-1, _ALIVE, b"")
                    time.sleep(interval)

        def execute(number: int, content: bytes) -> None:
            def ask(question: Any) -> Any:
                send(number, "question", pickle.dumps(question))
                is_answer, value = pickle.loads(answers[number].get())
                if not is_answer:
                    raise EngineError(value)
                return value

            try:
                reply = "result", pickle.dumps(run(pickle.loads(content), ask))
            except BaseException as error:  # such as sys.exit() in user code: the driver waits for every call
                reply = "error", _dumped_error(error)
            del answers[number]
            send(number, *reply)

        threading.Thread(target=live, daemon=True).start()
        with suppress(EOFError):
            while True:
                number, content = driver.recv()
                if number in answers:
                    answers[number].put(content)
                else:
                    answers[number] = SimpleQueue()
                    threading.Thread(target=execute, args=(number, content), daemon=True).start()


class Trace(Exception):
    """Cause of an error that was raised beside the driver: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _dumped_error(error: BaseException) -> bytes:
    """Return an error by pickle, with its text and its traceback for a driver that cannot load it."""
    trace = "".join(traceback.format_exception(error))
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # user code may define any error
        text = type(error).__name__
    try:
        return pickle.dumps((pickle.dumps(error), text, trace))
    except Exception:
        return pickle.dumps((None, text, trace))


def _loaded_error(dumped: bytes | None, text: str, trace: str) -> Exception:
    """Return an error that was raised beside the driver, with its traceback there as its cause. One that is no
    Exception, or cannot be loaded, is a RuntimeError."""
    error: object = None
    with suppress(Exception):
        error = None if dumped is None else pickle.loads(dumped)
    raised = error if isinstance(error, Exception) else RuntimeError(text)
    raised.__cause__ = Trace(trace)
    return raised
