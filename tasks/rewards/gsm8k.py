r"""The answer to a problem of GSM8K is right if it is the label's number, digit by digit.

The answer is the last number of the response, as the filter `flexible-extract` of lm-evaluation-harness's task `gsm8k`
(version 3.0) finds it. Whether the number after the first `####` is right, its `strict-match`, is recorded too. Dollar
signs, commas and a full stop do not count. Scores differ from others' in two cases: thoughts do not count here, and a
response that was cut off has no last number.
"""

import re
from typing import Any

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample, required_label

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")


def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the last number is the label, else 0. Raises ValueError without a label."""
    answers = extracted(sample)
    return {"reward": answers["flexible"], **answers}


def extracted(sample: Sample) -> dict[str, Any]:
    """Return `flexible` and `strict`, 1 or 0 each, and the `answer` of each. Raises ValueError without a label."""
    label = required_label(sample, "gsm8k")
    expected, final = _number(label.rpartition("#### ")[2]), answer_of(sample)
    marked, numbers = _STRICT.search(final), _NUMBER.findall(final)
    strict = None if marked is None else _number(marked[1])
    flexible = None if sample.truncated or not numbers else _number(numbers[-1])
    return {
        "flexible": float(flexible == expected),
        "strict": float(strict == expected),
        "answer": flexible,
        "strict_answer": strict,
    }


def _number(text: str) -> str:
    return re.sub(r"[,$]", "", text).removesuffix(".").strip()
