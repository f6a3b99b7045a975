r"""The answer to a problem of AIME is right if it is the label, an integer from 0 to 999.

The answer is the content of the last `\boxed{…}`. Without a box it is what the last sentence says, in a response that
was not cut off. Leading zeros, known units, parentheses and a name before `=` do not count; an expression that is still
to be computed is no integer. The tasks `aime24` and `aime25` of lm-evaluation-harness (version 0.0) read the same box.
`reward` accepts some answers as they do; `strict` accepts only what is the label beyond doubt:

| | lm-evaluation-harness | reward | strict |
|---|---|---|---|
| `33\%` | 33 | 33 | nothing |
| without a box: the text between the first `$` and the last | always counts | the same | only `is $33$` |
| `33 \text{ million}`, `2x=33` | 33 | nothing | nothing |
| `x = 11 = 33`, `x = 3 \cdot 11 = 33` | nothing: it cuts at one `=` | nothing | nothing |
| `m + n = 33`, `033`, `The answer is 33.` | nothing | 33 | 33 |
"""

import re
from typing import Any

from cairn.tasks.rewards import notation
from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, final_answer, last_boxed
from cairn.tasks.rewards.sample import Sample

_IGNORED = re.compile(r"\\?%")


def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the answer is the label, else 0, and `strict`. Raises ValueError where the label is no such
    integer."""
    expected = notation.integer(sample.label or "")
    if expected is None or not 0 <= expected <= 999:
        raise ValueError(f"aime needs an integer from 0 to 999 as the label, and the row has {sample.label!r}")
    strict = notation.integer(final_answer(sample) or "")
    answer = _harness(sample) if strict is None else strict
    return {
        "reward": float(answer == expected),
        "strict": float(strict == expected),
        "answer": None if answer is None else str(answer),
    }


def _harness(sample: Sample) -> int | None:
    """Return what lm-evaluation-harness accepts as the answer in addition."""
    final = answer_of(sample)
    try:
        text = last_boxed(final)
    except UnclosedBox:
        return None
    if text is None and not sample.truncated:
        text = final.partition("$")[2].rpartition("$")[0]
    return notation.integer(_IGNORED.sub("", text or "", count=1))
