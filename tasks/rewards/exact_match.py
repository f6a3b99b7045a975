r"""The answer is right if it equals the label, character by character.

The answer is the content of the response's last `\boxed{…}`, else the last number of a response that was not cut off.
Thoughts do not count, and a response that ends within its thoughts or a box has no answer. Spaces at the ends do not
count, runs of spaces count as one, and the commas of a number such as 1,234 do not count.
"""

import re

from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.sample import Sample, required_label

# A minus after a digit is a subtraction.
_NUMBER = re.compile(r"(?<![\d.])(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def grade(sample: Sample) -> float:
    """Return 1 if the answer equals the label, else 0. Raises ValueError without a label."""
    label = required_label(sample, "exact_match")
    final = answer_of(sample)
    try:
        answer = last_boxed(final)
    except UnclosedBox:
        return 0.0
    if answer is None and not sample.truncated:
        numbers = _NUMBER.findall(final)
        answer = numbers[-1] if numbers else None
    return float(answer is not None and _normalise(answer) == _normalise(label))


def _normalise(text: str) -> str:
    text = " ".join(text.split())
    return text.replace(",", "") if _NUMBER.fullmatch(text) else text
