"""A process beside the driver, in which the bodies of steps run that read many tokens.

It is a child of the driver on the same machine, with the same search path, working folder and environment. So user code
in it sees what it sees in the driver. Bodies run in threads there, as many as the driver waits for. A body may ask the
driver a question, such as for the grades of samples: graders and their limits are the driver's.

    driver ── (number, body's arguments) ──▶ process
           ◀─ (number, question)         ──             any number of times
           ── (number, answer)           ──▶
           ◀─ (number, result or error)  ──

Where the process is lost, all of its calls raise EngineDied, and the next call starts another one.
"""

import itertools
import pickle
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from cairn.engines.processes.child import Child, die_with
from cairn.engines.types.errors import EngineDied, EngineError

Question = Callable[[Any], Any]
"""Function that asks the driver."""


@dataclass
class _Call:
    """A call that the driver waits for: its messages, None once the process is lost."""

    messages: "SimpleQueue[tuple[str, bytes] | None]" = field(default_factory=SimpleQueue)


class StepProcess:
    """The process, which starts when it is first needed. Thread-safe."""

    def __init__(self, module: str) -> None:
        """`module`: its main program, see `serve`."""
        self._module = module
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
            while (message := call.messages.get()) is not None:
                kind, content = message
                if kind == "result":
                    return pickle.loads(content)
                if kind == "error":
                    raise raised or _loaded_error(content)
                try:
                    reply = True, answer(pickle.loads(content))
                except Exception as error:
                    raised, reply = error, (False, str(error))
                self._send(child, (number, pickle.dumps(reply)))
        finally:
            with self._lock:
                self._calls.pop(number, None)
        raise EngineDied("the process beside the driver, in which steps run, was lost: it may have had no memory left")

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
        child = Child(self._module)
        started.put(child)
        with suppress(EOFError, OSError):
            while True:
                number, kind, content = child.connection.recv()
                with self._lock:
                    call = self._calls.get(number)
                if call is not None:
                    call.messages.put((kind, content))
        child.kill()
        with self._lock:
            self._child, lost = None, list(self._calls.values())
            self._calls.clear()
        for call in lost:
            call.messages.put(None)

    def _send(self, child: Child, message: tuple[int, bytes]) -> None:
        with self._sending, suppress(OSError):  # a lost process ends the call
            child.connection.send(message)


def serve(connection: int, parent: int, run: Callable[[Any, Question], Any]) -> None:
    """Serve the requests of a driver until it ends; the main program of the process.

    Args:
        connection: file descriptor of the connection.
        parent: id of the driver's process.
        run: executes a request, with the function that asks the driver.
    """
    die_with(parent)
    with Connection(connection) as driver:
        lock, answers = threading.Lock(), dict[int, SimpleQueue[bytes]]()

        def send(number: int, kind: str, content: bytes) -> None:
            with lock:
                driver.send((number, kind, content))

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


def _loaded_error(content: bytes) -> Exception:
    """Return an error that was raised beside the driver, with its traceback there as its cause. One that is no
    Exception, or cannot be loaded, is a RuntimeError."""
    dumped, text, trace = pickle.loads(content)
    error: object = None
    with suppress(Exception):
        error = None if dumped is None else pickle.loads(dumped)
    raised = error if isinstance(error, Exception) else RuntimeError(text)
    raised.__cause__ = Trace(trace)
    return raised
