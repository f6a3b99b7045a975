"""DAPO's reward."""

from typing import Any

from cairn.tasks.rewards import dapo
from cairn.tasks.rewards.boxed import last_boxed
from cairn.tasks.rewards.sample import Sample

_BOX_WITHIN = 100
"""Characters at the end in which a box is searched."""


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Return `score`, +1 or −1, `acc` and `pred`: by the line after `Answer:`, or with `strict_box_verify` by the last
    box."""
    if not strict_box_verify:
        graded = dapo.grade(Sample(solution_str, ground_truth))
        return {name: graded[name] for name in ("score", "acc", "pred")}
    answer = last_boxed(solution_str[-_BOX_WITHIN:])
    right = answer == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": answer}
