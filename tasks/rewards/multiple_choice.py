r"""The answer to a multiple-choice question is right if its letter is the label.

The letter is the one that the last sentence with `answer is` or `Answer:` names; else the one in the last `\boxed{…}`,
as in `\boxed{\textbf{C}}` or `\boxed{C. water}`; else, in a response that was not cut off, the one that its last clause
names alone: see `cairn.tasks.rewards.choices`. Several letters, and denied ones, count as none. Only the letters of the
choices count, where the metadata has `choices`. lm-evaluation-harness's `gpqa_diamond_cot_zeroshot` (version 2.2)
searches for the same phrase in its filter `strict-match`; its `flexible-extract` takes the last letter in parentheses,
whatever the text says about it."""

from string import ascii_uppercase
from typing import Any

from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.choices import choice_in_box, denies_what_follows, letter_of
from cairn.tasks.rewards.sample import Sample, required_label


def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the letter is the label, else 0. Raises ValueError without a label."""
    label = required_label(sample, "multiple_choice")
    answer = _letter(sample, [str(choice) for choice in sample.metadata.get("choices") or ()])
    return {"reward": float(answer == label.strip("() ").upper()), "answer": answer}


def _letter(sample: Sample, choices: list[str]) -> str | None:
    letters, final = ascii_uppercase[: len(choices) or 26], answer_of(sample)
    stated = letter_of(final, letters, loose=False)
    if stated is not None:
        return stated or None
    try:
        boxed = last_boxed(final)
    except UnclosedBox:
        return None
    if boxed is not None and (letter := choice_in_box(boxed, letters, choices)):
        return None if denies_what_follows(final[: max(map(final.rfind, ("\\boxed", "\\fbox")))]) else letter
    return None if sample.truncated or boxed else letter_of(final, letters) or None
