r"""The answer is right if it is mathematically equal to the label, as math-verify judges it.

The answer is what stands in the response's last `\boxed{…}`, else the last expression that math-verify finds in a
response that was not cut off. What was thought does not count, and a response that ends within its thoughts or a box
has no answer. The label is the bare answer in LaTeX or plain numbers (`72`, `\frac{1}{2}`), or a text with the answer
in `\boxed{…}`.

Before math-verify sees it, `cairn.tasks.rewards.notation` undoes how an answer is written. Where others decide
otherwise:

| | lm-evaluation-harness (`minerva_math`), verl (`math_dapo`) | slime (`math_utils`) | here |
|---|---|---|---|
| where it stands | behind `Answer:` or `The final answer is` | in the last box | in the last box |
| `5=6=18`, label 18 | right: what follows the last `=` | wrong: text with `=` | wrong: it says that 5 is 6 |
| `y=3x=18` | right | wrong: one `=`, behind at most two letters | right |
| `36/2`, label 18 | right in Minerva, wrong in verl: compared as text | wrong: the label is an integer | right |
| units | a list of words, removed wherever they stand | the same | removed behind a number, if the label is one |
| `0.333`, label 1/3 | wrong | wrong | wrong; right from six digits on, as math-verify rounds |
| `\frac13 \approx 0.333`, label 1/3 | no rule | no rule | right: what is exact comes first |
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from cairn.tasks.rewards import notation
from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.sample import Sample

# math-verify warns that its own time limit is off; the pool's deadline stands in for it, and signals would meet it.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def grade(sample: Sample) -> float:
    """1 if the answer equals the label, else 0, also without an answer. ValueError without a usable label."""
    if sample.label is None:
        raise ValueError("math needs a label, and the row has none")
    final = answer_of(sample)
    try:
        boxed = last_boxed(final)
    except UnclosedBox:
        boxed = ""
    if boxed is not None:
        return float(is_right(boxed, sample.label))
    gold = _gold(_label(sample.label))
    return 0.0 if sample.truncated else float(verify(gold, parse(final, parsing_timeout=None), timeout_seconds=None))


def is_right(boxed: str, label: str) -> bool:
    """Whether what stands in a box equals the label; an empty box equals none. ValueError without a usable label."""
    expected = _label(label)
    gold = _gold(expected)
    answer = notation.plain(boxed)
    if not answer:
        return False
    if (name := notation.words(expected)) is not None:
        return notation.words(answer) == name
    if notation.is_number(expected):
        answer = notation.without_unit(answer)
    if "=" not in expected:
        stated = notation.stated(answer, _value, _equal)
        if stated is None:
            return False
        answer = notation.without_unit(stated) if notation.is_number(expected) else stated
    return bool(verify(gold, _parsed(answer), timeout_seconds=None))


@lru_cache(maxsize=1024)
def _label(label: str) -> str:
    """The answer that a label holds."""
    boxed = last_boxed(label)
    return notation.without_unit(notation.plain(label if boxed is None else boxed))


@lru_cache(maxsize=1024)
def _gold(label: str) -> Any:
    gold = _parsed(label)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the label {label!r}")
    return gold


def _parsed(answer: str) -> Any:
    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)


def _equal(one: str, other: str) -> bool:
    return bool(verify(_parsed(one), _parsed(other), timeout_seconds=None))


def _value(expression: str) -> float | None:
    found = _parsed(notation.without_unit(expression))
    if not found or not getattr(found[0], "is_number", False):
        return None
    value = complex(found[0])
    return value.real if value.imag == 0 else None
