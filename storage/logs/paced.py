"""A background writer for logs: items that arrive one by one are written in shared parts.

The items appended during the last write and the following `PACE` seconds form the next part. So a log keeps up with any
rate with one write at a time, and `append` never waits for a write.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from cairn.storage.store.errors import StoreError

PACE = 0.08
"""Seconds between two parts, so that items that finish one by one share a part."""


class PacedWriter:
    """Writer of a log in a background thread. As a context manager it closes itself.

    `append` and `close` raise the error that stopped the background thread, if any.
    """

    def __init__(self, write: Callable[[list[Any]], object], what: str, deadline: float = 120.0) -> None:
        """Create a writer. Its thread starts with the first item.

        Args:
            write: makes the items of a part durable.
            what: what it writes, for messages.
            deadline: greatest number of seconds for `close`.
        """
        self._write = write
        self._what = what
        self._deadline = deadline
        self._changed = threading.Condition()
        self._waiting: list[Any] = []
        self._then: list[tuple[Callable[[], None], Callable[[], None]]] = []
        """Functions to call when everything appended before is durable, and if it never will be."""
        self._urgent = False
        self._closed = False
        self._error: Exception | None = None
        # A daemon, so that an ending process does not wait for a store that does not respond.
        self._writer = threading.Thread(target=self._write_parts, name="paced-writer", daemon=True)

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
        except Exception as second:  # the caller must see the error that ended the work
            error.add_note(f"{type(second).__name__} meanwhile: {second}")

    def append(
        self,
        *finished: Any,
        then: Callable[[], None] | None = None,
        otherwise: Callable[[], None] = lambda: None,
        urgent: bool = False,
    ) -> None:
        """Queue finished items and return at once.

        Args:
            finished: the items.
            then: called in the writer's thread when these items and all before them are durable.
            otherwise: called in place of `then` if an error stops the writer before.
            urgent: write the next part without waiting for further items, because a caller waits for it.
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
            if self._writer.ident is None:
                self._writer.start()

    def require_intact(self) -> None:
        """Raise the error that stopped the writer, if there was one."""
        with self._changed:
            self._raise_error()

    @property
    def broken(self) -> bool:
        """Whether an error has stopped the writer. Then nothing more becomes durable."""
        return self._error is not None

    def close(self) -> None:
        """Wait until everything appended is durable. Raises StoreError if that takes longer than the deadline."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._writer.ident is not None:
            self._writer.join(self._deadline)
        with self._changed:
            self._raise_error()
        if self._writer.is_alive():
            raise StoreError(f"writing {self._what} did not finish within {self._deadline:.0f} s")

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _write_parts(self) -> None:
        then: list[tuple[Callable[[], None], Callable[[], None]]] = []
        pace = 0.0  # the first part is written at once
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._urgent, pace)
                    self._changed.wait_for(lambda: self._waiting or self._then or self._closed)
                    waiting, self._waiting = self._waiting, []
                    then, self._then = self._then, []
                    self._urgent = False
                if not waiting and not then:
                    return
                pace = PACE
                if waiting:
                    self._write(waiting)
                while then:
                    then.pop(0)[0]()
        except Exception as error:
            with self._changed:
                self._error = error
                callers = [*then, *self._then]
            for _, otherwise in callers:
                with suppress(Exception):  # a failing caller must not keep the others waiting
                    otherwise()
