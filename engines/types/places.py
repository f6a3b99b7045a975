"""Places in user code, `file.py:line`, at the end of the errors of samples."""

import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

_LIBRARIES = tuple(
    os.path.join(folder, "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    if (folder := sysconfig.get_path(name)) is not None
)
_OWN = os.path.join(Path(__file__).resolve().parents[2], "")
_OWN_FOLDERS = tuple(os.path.join(_OWN, name, "") for name in ("configs", "storage", "engines", "tasks", "flows"))
_PLACE = re.compile(r" \(([^()\s]+:\d+)\)$")


def with_place(message: str, error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Return the message with the innermost place in user code that the error passed, such as `(rewards.py:7)`.

    Without such a place it is the innermost one in the file of `function`, or where that is defined: an error over a
    wrong result passed none.
    """
    passed = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    code = None if function is None else _code_of(function)
    places = [place for place in passed if _is_users(place[0])]
    if not places and code is not None:
        places = [place for place in passed if place[0] == code.co_filename]
        if not places and _is_users(code.co_filename):
            places = [(code.co_filename, code.co_firstlineno)]
    return f"{message} ({os.path.basename(places[-1][0])}:{places[-1][1]})" if places else message


def split_place(message: str) -> tuple[str, str | None]:
    """Return a message without its place, and the place; None where it has none."""
    found = _PLACE.search(message)
    return (message, None) if found is None else (message[: found.start()], found[1])


def _is_users(file: str) -> bool:
    return os.path.isabs(file) and not file.startswith((*_LIBRARIES, *_OWN_FOLDERS))


def _code_of(function: Any) -> CodeType | None:
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    called = function if inspect.isroutine(function) else type(function).__call__
    return getattr(called, "__code__", None)
