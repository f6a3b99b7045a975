r"""The answer to a problem of AIME is right if it is the label, an integer from 0 to 999.

It stands in the last `\boxed{…}`; without one it is the last integer of a response that was not cut off. Leading zeros,
units, parentheses and `x =` before it do not count; an expression that is still to be computed is no integer. The tasks
`aime24` and `aime25` of lm-evaluation-harness (version 0.0) look into the same box and leave out the same; they take no
last integer.
"""

import re
from typing import Any

from cairn.tasks.rewards import notation
from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.sample import Sample

_INTEGER = re.compile(r"(?<![\w.,\\^{/-])\d{1,3}(?![\w^}/]|[.,]\d|\s*\\)")
"""A number of one to three digits that is no part of an expression."""
_IGNORED = re.compile(r"\\?\$|\^\{?\\circ\}?|\\?%")


def grade(sample: Sample) -> dict[str, Any]:
    """1 if the answer is the label, else 0. ValueError without a label that is such an integer."""
    expected = None if sample.label is None else _integer(sample.label)
    if expected is None:
        raise ValueError(f"aime needs an integer from 0 to 999 as the label, and the row has {sample.label!r}")
    answer = _answer(sample)
    return {"reward": float(answer == expected), "answer": None if answer is None else str(answer)}


def _answer(sample: Sample) -> int | None:
    final = answer_of(sample)
    try:
        boxed = last_boxed(final)
    except UnclosedBox:
        return None
    if boxed is not None:
        return _integer(boxed)
    integers = [] if sample.truncated else _INTEGER.findall(final.replace("$", " "))
    return int(integers[-1]) if integers else None


def _integer(text: str) -> int | None:
    """The integer that is written; None where it is none, or not from 0 to 999."""
    bare = _IGNORED.sub("", notation.plain(text)).rpartition("=")[2]
    written = notation.without_unit(bare.strip("() "))
    return int(written) if re.fullmatch(r"0*\d{1,3}", written) else None
