r"""The score of reasoning-gym's own scorer for an answer to one of its questions, from 0 to 1.

Rows come from the data source `reasoning_gym`. Its option `answer` says where the answer is: in the response's last
`\boxed{…}`, in its last `<answer>…</answer>`, or the whole response. Thoughts do not count, and a response without an
answer scores 0. Many scorers give a little to a wrong answer: `right`, recorded with the reward, is 1 only for a full
score.
"""

import json
from collections.abc import Callable
from typing import Any

from cairn.configs.kinds import plugin
from cairn.tasks.rewards.boxed import answer_of, whole_box
from cairn.tasks.rewards.sample import Sample


@plugin(library="reasoning-gym")
def grade(sample: Sample) -> dict[str, Any]:
    """Return the score, and whether it is full. Raises ValueError for a row of another source."""
    row = sample.metadata.get("reasoning_gym")
    if not isinstance(row, dict):
        raise ValueError(
            "the grader reasoning_gym needs rows of the data source reasoning_gym, but this row is from another"
        )
    from cairn.tasks.rewards import scorers  # reasoning-gym takes long to import

    answer = _answer(answer_of(sample), row["answer"], scorers.extract_answer)
    score = 0.0
    if answer:
        scorer = scorers.scorer(row["generator"], json.dumps(row["config"], sort_keys=True))
        try:
            score = float(scorer(answer=answer, entry=row["entry"]))
        except MemoryError:
            raise
        # Scorers raise all kinds of errors on an answer that they cannot read. On the right answer they do not: the
        # data source has checked that.
        except Exception:
            score = 0.0
    return {"reward": score, "right": float(score == 1.0)}


def _answer(final: str, place: str, in_tag: Callable[[str], str | None]) -> str | None:
    if place == "whole":
        return final.strip()
    if place == "tag":
        return in_tag(final)
    boxed = whole_box(final)
    return None if boxed is None else boxed.strip()
