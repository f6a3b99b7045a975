r"""The answer to a multiple-choice question is right if its letter is the label.

The letter is the one behind the last `answer is` or `Answer:`, with or without parentheses; else the one in the last
`\boxed{…}`; else, in a response that was not cut off, the last letter in parentheses. Only the letters of the choices
count, where the metadata has `choices`. lm-evaluation-harness's `gpqa_diamond_cot_zeroshot` (version 2.2) looks for the
same phrase in its filter `strict-match`, and for the last letter in parentheses in `flexible-extract`.
"""

import re
from typing import Any

from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.sample import Sample

_SAID = re.compile(
    r"\b(?i:answer(?:\s+is)?\s*:|answer\s+is)[\s*_$]*(?:\\boxed\{)?\s*(?:\\text\{)?\s*(?:\(\s*([A-Z])\s*\)|([A-Z])\b(?!['’]))"
)
_BOXED = re.compile(r"(?:\\text\{)?\s*\(?\s*([A-Z])\s*\)?\s*\}?\.?")
_PARENTHESES = re.compile(r"\(([A-Z])\)")


def grade(sample: Sample) -> dict[str, Any]:
    """1 if the letter is the label, else 0. ValueError without a label."""
    if sample.label is None:
        raise ValueError("multiple_choice needs a label, and the row has none")
    count = len(sample.metadata.get("choices") or ()) or 26
    answer = _letter(sample, "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:count])
    return {"reward": float(answer == sample.label.strip("() ").upper()), "answer": answer}


def _letter(sample: Sample, letters: str) -> str | None:
    final = answer_of(sample)
    said = [letter for found in _SAID.findall(final) if (letter := "".join(found)) in letters]
    if said:
        return said[-1]
    try:
        boxed = _BOXED.fullmatch(last_boxed(final) or "")
    except UnclosedBox:
        return None
    if boxed is not None:
        return boxed[1] if boxed[1] in letters else None
    parentheses = [letter for letter in _PARENTHESES.findall(final) if letter in letters]
    return parentheses[-1] if parentheses and not sample.truncated else None
