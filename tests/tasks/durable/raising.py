"""Main program of a process beside a driver whose bodies raise errors of every kind."""

import asyncio
from typing import Any

from cairn.tasks.durable.beside import Question, serve


class Mute(Exception):
    """Error that has no text."""

    def __str__(self) -> str:
        raise ValueError("it has no text")


class Demanding(Exception):
    """Error that pickle writes and cannot read."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


ERRORS: dict[str, BaseException] = {
    "exit": SystemExit("enough"),
    "cancelled": asyncio.CancelledError("late"),
    "interrupted": KeyboardInterrupt(),
    "mute": Mute(),
    "cannot be loaded": Demanding("no key", "row 3"),
    "cannot be dumped": KeyError(lambda: 0),
    "common": KeyError("answer"),
}


def users_function(request: str, ask: Question) -> Any:
    raise ERRORS[request]


def main(connection: int, parent: int, *others: Any) -> None:
    serve(connection, parent, users_function, *others)
