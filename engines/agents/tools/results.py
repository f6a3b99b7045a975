"""Validation of tool results: JSON values of bounded size, checked before they are copied.

| result of the tool | becomes |
|---|---|
| text | itself; beyond the tool's `max_output` it is cut, with a note |
| None, booleans, finite numbers; lists, tuples and objects of these, with strings as keys | itself, tuples as lists |
| the same, with more than `max_output` characters in total | `ToolFailed`, `size`: half an object is useless |
| bytes and everything else | `ToolFailed`, `type` |
"""

import math
from typing import Any

from cairn.engines.agents.tools.errors import Reason, ToolFailed, storable

_DEEPEST = 64
_MOST_BITS = 4096
"""Maximum size of an integer in bits: Python prints at most 4,300 digits."""


def json_value(tool: str, value: Any, max_output: int) -> Any:
    """Return `value` as the result of a tool. Raises ToolFailed where it is not a valid one."""
    if isinstance(value, str):
        return shortened(value, max_output)
    return _Bounded(tool, max_output).value(value, 0)


def shortened(text: str, length: int) -> str:
    """Return `text` cut to `length` characters, with a note of how many were left out."""
    left_out = len(text) - length
    if left_out > 0:
        text = f"{text[:length]}\n[{left_out:,} more characters left out]"
    return storable(text)


class _Bounded:
    """Copies a value up to a maximum size."""

    def __init__(self, tool: str, length: int) -> None:
        self._tool = tool
        self._length = length
        self._left = length

    def value(self, value: Any, depth: int) -> Any:
        if depth > _DEEPEST:
            raise ToolFailed(f"{self._tool}: what it returned is nested more than {_DEEPEST} deep", Reason.TYPE)
        if isinstance(value, str):
            self._take(len(value) + 2)
            return storable(value)
        if value is None or isinstance(value, bool):
            self._take(4)
            return value
        if isinstance(value, int):
            if value.bit_length() > _MOST_BITS:
                raise ToolFailed(
                    f"{self._tool}: it returned a whole number of {value.bit_length():,} bits, of at most "
                    f"{_MOST_BITS:,}",
                    Reason.SIZE,
                )
            self._take(max(1, value.bit_length() // 4))
            return int(value)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ToolFailed(f"{self._tool}: it returned {value}, which is no number in JSON", Reason.TYPE)
            self._take(8)
            return float(value)
        if isinstance(value, list | tuple):
            return [self._element(one, depth) for one in value]
        if isinstance(value, dict):
            return {self._key(key): self._element(one, depth) for key, one in value.items()}
        raise ToolFailed(
            f"{self._tool}: it returned a value of type {type(value).__name__}, which is not text, a number, a list or "
            "an object of these",
            Reason.TYPE,
        )

    def _element(self, value: Any, depth: int) -> Any:
        self._take(2)
        return self.value(value, depth + 1)

    def _key(self, key: Any) -> str:
        if not isinstance(key, str):
            raise ToolFailed(
                f"{self._tool}: it returned an object with a key of type {type(key).__name__}; keys are texts",
                Reason.TYPE,
            )
        self._take(len(key) + 2)
        return storable(key)

    def _take(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise ToolFailed(
                f"{self._tool}: it returned more than the {self._length:,} characters that it may", Reason.SIZE
            )
