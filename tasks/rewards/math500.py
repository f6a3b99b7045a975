"""The answer to a problem of MATH-500 is right if it is mathematically equal to the label, as in the grader `math`. The
answer is recorded with the reward, in the form of `cairn.tasks.rewards.notation`, so that answers can be counted."""

from typing import Any

from cairn.configs.kinds import plugin
from cairn.tasks.rewards import math, notation
from cairn.tasks.rewards.boxed import final_answer
from cairn.tasks.rewards.sample import Sample


@plugin(library="math-verify")
def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the answer equals the label, else 0, also without an answer. Raises ValueError without a usable
    label."""
    answer = final_answer(sample)
    return {"reward": math.grade(sample), "answer": None if answer is None else notation.read(answer)[0]}
