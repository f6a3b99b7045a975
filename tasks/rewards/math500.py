"""The answer to a problem of MATH-500 is right if it is mathematically equal to the label, as the grader `math` judges.
It is told beside the reward, as `cairn.tasks.rewards.notation` writes it, so that answers can be counted."""

from typing import Any

from cairn.tasks.rewards import math, notation
from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> dict[str, Any]:
    """1 if the answer equals the label, else 0, also without an answer. ValueError without a usable label."""
    reward = math.grade(sample)
    try:
        boxed = last_boxed(answer_of(sample))
    except UnclosedBox:
        boxed = None
    return {"reward": reward, "answer": None if boxed is None else notation.without_unit(notation.plain(boxed))}
