r"""The answer is right if it is mathematically equal to the label, as math-verify judges it.

The answer is what stands in the response's last `\boxed{…}`, else the last expression that math-verify finds. The label
is the bare answer in LaTeX or plain numbers (`72`, `\frac{1}{2}`), or a text with the answer in `\boxed{…}`.
"""

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from tasks.rewards.boxed import last_boxed

# math-verify warns that its own time limit is off; the pool's deadline stands in for it, and signals would meet it.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def grade(response: str, label: str | None, metadata: dict[str, Any]) -> float:
    """1 if the answer equals `label`, else 0, also without an answer. ValueError without a usable label."""
    if label is None:
        raise ValueError("math needs a label, and the row has none")
    answer = last_boxed(response)
    given = parse(response if answer is None else f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(verify(_gold(label), given, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _gold(label: str) -> Any:
    boxed = last_boxed(label)
    gold = parse(f"\\boxed{{{label if boxed is None else boxed}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify finds no expression in the label {label!r}")
    return gold
