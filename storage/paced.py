"""Writing what comes in one by one in parts that many share, in a thread of its own.

Whatever was appended while the last part was written, and for `PACE` seconds after it, goes out as the next part: so a
log keeps up with any rate with one write at a time, and whoever appends never waits for it.
"""

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from cairn.storage.errors import StoreError

PACE = 0.08
"""Seconds between two parts, so that what finishes one by one shares them."""


class PacedWriter:
    """`append` and `close` raise the error that stopped the background writer, if any. As a context manager it closes
    itself."""

    def __init__(self, write: Callable[[int, list[Any]], None], what: str, deadline: float = 120.0) -> None:
        """`write(number, items)` makes a part durable. `what` it writes, for messages. `deadline`: seconds that `close`
        may take."""
        self._write = write
        self._what = what
        self._deadline = deadline
        self._changed = threading.Condition()
        self._waiting: list[Any] = []
        self._then: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """What is called when all that was appended before is durable, or never will be."""
        self._urgent = False
        self._closed = False
        self._error: Exception | None = None
        # A daemon: a process that ends must not wait for a store that does not answer.
        self._writer = threading.Thread(target=self._write_parts, name="paced-writer", daemon=True)
        self._writer.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as second:  # what broke the work off is what its caller must hear of
            error.add_note(f"{type(second).__name__} meanwhile: {second}")

    def append(
        self,
        *finished: Any,
        then: Callable[[], None] | None = None,
        otherwise: Callable[[], None] = lambda: None,
        urgent: bool = False,
    ) -> None:
        """Hand over what has finished. Returns at once.

        Args:
            then: called by the writer's thread when it is durable with all before it.
            otherwise: called in its place where an error stops the writer before.
            urgent: somebody waits for `then`, so that the writer does not wait for others.
        """
        with self._changed:
            self._raise_error()
            if self._closed:
                raise ValueError("the log is closed")
            self._waiting += finished
            if then is not None:
                self._then.append((then, otherwise))
            self._urgent |= urgent
            self._changed.notify()

    def require_intact(self) -> None:
        """Raise the error that stopped the writer, if there was one."""
        with self._changed:
            self._raise_error()

    @property
    def broken(self) -> bool:
        """Whether an error has stopped the writer: nothing more becomes durable."""
        return self._error is not None

    def close(self) -> None:
        """Return when everything appended is durable. Raises StoreError if that takes longer than the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._writer.join(self._deadline)
        with self._changed:
            self._raise_error()
        if self._writer.is_alive():
            raise StoreError(f"writing {self._what} did not end in {self._deadline:.0f} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_parts(self) -> None:
        then: list[tuple[Callable[[], None], Callable[[], None]]] = []
        try:
            for number in itertools.count():
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._urgent, PACE if number else 0)
                    self._changed.wait_for(lambda: self._waiting or self._then or self._closed)
                    waiting, self._waiting = self._waiting, []
                    then, self._then = self._then, []
                    self._urgent = False
                if not waiting and not then:
                    return
                if waiting:
                    self._write(number, waiting)
                while then:
                    then.pop(0)[0]()
        except Exception as error:
            with self._changed:
                self._error = error
                waiting_for_it = [*then, *self._then]
            for _, otherwise in waiting_for_it:
                with suppress(Exception):  # each is told, whatever another makes of it
                    otherwise()
