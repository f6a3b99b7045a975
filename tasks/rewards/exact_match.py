r"""The answer is right if it is the label, letter by letter.

The answer is what stands in the response's last `\boxed{…}`, else the last number of the response. Blanks at the ends
do not count, those within count as one, and neither do the commas of a number such as 1,234.
"""

import re
from typing import Any

from tasks.rewards.boxed import last_boxed

# A minus after a digit subtracts.
_NUMBER = re.compile(r"(?<![\d.])(?:(?<!\d)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def grade(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1 if the answer equals `label`, else 0. ValueError without a label."""
    if label is None:
        raise ValueError("exact_match needs a label, and the row has none")
    answer = last_boxed(response)
    if answer is None:
        numbers = _NUMBER.findall(response)
        answer = numbers[-1] if numbers else None
    return float(answer is not None and _normalise(answer) == _normalise(label))


def _normalise(text: str) -> str:
    text = " ".join(text.split())
    return text.replace(",", "") if _NUMBER.fullmatch(text) else text
