"""A sample as another trainer recorded it, and checks of values from its files, which are not trusted."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from cairn.storage.store.canonical import to_json

_LARGEST = 3.4e38
"""Largest reward that a float32 holds."""
_LARGEST_ID = 2**31 - 1


class Unreadable(Exception):
    """A value that a format does not allow. The message is a sentence without the place."""


@dataclass(frozen=True)
class Tokens:
    """Tokens of a trajectory: a prompt, then T tokens that the policy sampled or that the environment gave."""

    prompt_ids: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[int]
    """1 for tokens that the policy sampled and that may be trained on, else 0."""
    log_probs: Sequence[float] | None
    """Under the policy that sampled; 0 for other tokens."""
    advantages: Sequence[float] | None
    segments: Sequence[Mapping[str, Any]]
    """Pieces in the form of the column `segments` of the rollout table."""


@dataclass(frozen=True)
class Recorded:
    """A sample; None for what its trainer did not record."""

    group: str
    """Samples of one prompt have equal values."""
    prompt: str
    response: str
    reward: float | None
    grader: str
    step: int | None = None
    """Step of the trainer."""
    session: str | None = None
    """Trajectories of one sample that are in several files have equal values."""
    components: Mapping[str, float] | None = None
    label: str | None = None
    advantage: float | None = None
    """Advantage of the whole response."""
    tokens: tuple[Tokens, ...] = ()
    """Trajectories; empty where a format has no tokens."""
    weight_version: int | None = None
    finish_reason: str | None = None
    status: str | None = None
    error: str | None = None
    seconds: float | None = None
    not_trained: str | None = None
    """Why the trainer did not train on it; None: it did, as far as is known."""
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """A format of traces."""

    name: str
    about: str
    """Where its trainer writes it, for messages."""
    files: Callable[[Path], list[Path]]
    """Returns the files with traces in a folder."""
    read: Callable[[Any, "Reading"], list[Recorded]]
    """Returns the samples of one line's JSON object or, if not `by_line`, of a whole file's bytes. Raises Unreadable,
    and ValueError for bytes that are not in the format."""
    by_line: bool
    step: Callable[[Path], int | None] = lambda file: None
    """Returns the trainer's step, from the path of a file."""
    one_batch: bool = False
    """Whether files that are found together make one iteration, although they name no step."""


@dataclass(frozen=True)
class Reading:
    """Choices of the user, and notes on what is read."""

    rewards: Mapping[str, float]
    """Weights of the columns that make the reward; empty: all, each with weight 1."""
    note: Callable[[str], None]


def text(value: Any, name: str) -> str:
    """Return a text without halves of surrogate pairs, which are no characters. Raises Unreadable for other types."""
    if not isinstance(value, str):
        raise Unreadable(f"{name} is {_kind(value)}, not text")
    return value.encode("utf-8", "replace").decode()


def as_json(value: Any) -> str:
    """Return a value as canonical JSON without halves of surrogate pairs; what is no JSON, such as a time, as text."""
    return text(to_json(json.loads(json.dumps(value, default=str))), "")


def spelled(value: Any) -> str | None:
    """Return a text as it is, None for null, and every other value as JSON."""
    return None if value is None else text(value, "") if isinstance(value, str) else as_json(value)


def number(value: Any, name: str) -> float | None:
    """Return a number; None for null, NaN, infinities and what is too large for a reward. Raises Unreadable for other
    types."""
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise Unreadable(f"{name} is {_kind(value)}, not a number")
    return float(value) if _fits(value) else None


def whole(value: Any, name: str) -> int | None:
    """Return an integer from 0 on, or None for null. Raises Unreadable."""
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST_ID:
        raise Unreadable(f"{name} is {_kind(value)}, not a count")
    return value


def record(value: Any, name: str) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for null. Raises Unreadable."""
    if value is not None and not isinstance(value, dict):
        raise Unreadable(f"{name} is {_kind(value)}, not an object")
    return value or {}


def listed(value: Any, name: str) -> list[Any]:
    """Return a list; an empty one for null. Raises Unreadable."""
    if value is not None and not isinstance(value, list):
        raise Unreadable(f"{name} is {_kind(value)}, not a list")
    return value or []


def ids(value: Any, name: str) -> list[int]:
    """Return token ids. Raises Unreadable."""
    found = listed(value, name)
    if not all(type(one) is int and 0 <= one <= _LARGEST_ID for one in found):
        raise Unreadable(f"{name} has something other than token ids")
    return found


def floats(value: Any, length: int) -> list[float] | None:
    """Return a list of finite numbers of a certain length; None for anything else."""
    if not isinstance(value, list) or len(value) != length:
        return None
    return [float(one) for one in value] if all(isinstance(one, int | float) and _fits(one) for one in value) else None


def _fits(value: float) -> bool:
    """Whether a number is neither NaN nor too large for float32; an integer may be too large for any float."""
    return -_LARGEST < value < _LARGEST


def content(value: Any, name: str) -> str:
    """Return the text of a message's content: a text, parts with a `text`, or null."""
    if isinstance(value, list):
        parts = (record(part, name).get("text") for part in value)
        return "".join(text(part, name) for part in parts if part is not None)
    return "" if value is None else text(value, name)


def spoken(message: Mapping[str, Any], said: str, function: str) -> str:
    """Return what a message says: thoughts, text and calls of tools. `said`, `function`: keys of the text, and of a
    call's function."""
    thoughts = content(message.get("reasoning_content"), "reasoning_content")
    calls = [record(call, "tool_calls") for call in listed(message.get("tool_calls"), "tool_calls")]
    called = [f"\n[tool call {spelled(one.get(function))} {spelled(one.get('arguments'))}]" for one in calls]
    return "".join(
        [f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "", content(message.get(said), said), *called]
    )


def conversation(messages: Sequence[tuple[str, str]]) -> str:
    """Return messages, each of a role and a text, as one text. A single message is its text."""
    if len(messages) == 1:
        return messages[0][1]
    return "\n\n".join(f"[{role}]\n{message}" for role, message in messages)


def messages(value: Any, name: str) -> str:
    """Return a text, or a list of chat messages, as one text. Raises Unreadable."""
    if not isinstance(value, list):
        return text(value, name)
    rows = [record(message, name) for message in value]
    return conversation([(content(row.get("role"), name), content(row.get("content"), name)) for row in rows])


def segments(mask: Sequence[int], finish_reasons: Sequence[str | None] = ()) -> list[dict[str, Any]]:
    """Return the pieces of a response by its mask: runs of sampled tokens and runs of other ones. `finish_reasons`: of
    the sampled runs, in order."""
    found: list[dict[str, Any]] = []
    calls = 0
    for start, end in _runs(mask):
        sampled = bool(mask[start])
        reason = finish_reasons[calls] if sampled and calls < len(finish_reasons) else None
        call = str(calls) if sampled else None
        found.append({"tokens": end - start, "call": call, "seed": None, "finish_reason": reason})
        calls += sampled
    return found


def _runs(mask: Sequence[int]) -> list[tuple[int, int]]:
    edges = [0, *(place for place in range(1, len(mask)) if bool(mask[place]) != bool(mask[place - 1])), len(mask)]
    return [(start, end) for start, end in pairwise(edges) if start < end]


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "missing"}
    return kinds.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
