"""The choice that a response names is the label: rows and rules of slime's `gpqa`, which asks for less form than
`multiple_choice` does.

The letter is the first that follows `answer`, `option` or `choice` (with `is` or a colon), else the first that `is
correct`, else the last one that stands alone as a capital. A response that names none is right if it holds the text of
the right choice, as words. Which choice is right a row says by the label, a letter or the text of a choice, or by
`correct_letter` in its metadata; `choices` or `valid_letters` there say which letters count, else A to J.

| | slime's `gpqa` | here |
|---|---|---|
| a word behind `answer is`, as in `the answer is clear` | its first letter is the answer: C | is no letter |
| small letters | count behind `answer`, in words too | count where they stand alone, but for `a` before a word |
| the label 2 | C where it is a number, a text where it is a string | C, unless a choice is `2` |
| thoughts without an end | are searched for a letter | hold no answer |
| the right choice's text, where no letter is named | may stand within words | stands as whole words |
| the texts of several choices, where no letter is named | are paid if the right one is among them | name none |
| a label that is no choice | counts as a text | fails the sample, if it is a letter |
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample

_ALONE = r"(?:\(\s*([A-Za-z])\s*\)|\b([A-Za-z])\b(?!['’]\w|(?<=a)\s+[a-z]))"
_NAMED = (
    re.compile(rf"\b(?i:answer|option|choice)\s*(?i:is\b|:)?[\s:*_$'‘]*(?:\\boxed\{{)?\s*{_ALONE}"),
    re.compile(rf"{_ALONE}\s*is\s*(?:the\s*)?correct\b"),
)
_CAPITAL = re.compile(r"\b([A-Z])\b(?!['’]\w)")


def grade(sample: Sample) -> dict[str, Any]:
    """1 if the right choice is named, else 0. ValueError where the row does not say which is right."""
    choices = _choices(sample.metadata)
    letters = _letters(sample.metadata, choices)
    right, texts = _right(sample, choices, letters)
    final = answer_of(sample)
    answer = _letter(final, letters)
    if answer is not None and right is not None:
        return {"reward": float(answer == right), "answer": answer}
    said = _plain(final)
    found = [text for text in map(_plain, texts) if _holds(said, text)]
    named = [text for text in map(_plain, choices) if _holds(said, text)]
    alone = all(any(_holds(text, other) for text in found) for other in named)
    return {"reward": float(bool(found) and alone), "answer": answer}


def _choices(metadata: dict[str, Any]) -> list[str]:
    choices = metadata.get("choices") or ()
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def _letters(metadata: dict[str, Any], choices: Sequence[str]) -> list[str]:
    given = metadata.get("valid_letters")
    return [str(letter).upper() for letter in given] if given else list(ascii_uppercase[: len(choices) or 10])


def _right(sample: Sample, choices: Sequence[str], letters: Sequence[str]) -> tuple[str | None, list[str]]:
    """The letter of the right choice, if it can be told, and texts that stand for it."""
    label, given = (sample.label or "").strip(), sample.metadata.get("correct_letter")
    letter = given.strip().upper() if isinstance(given, str) and given.strip() else None
    if letter is None and label.strip("()").upper() in letters:
        letter = label.strip("()").upper()
    if letter is None and label.isdecimal() and int(label) < len(letters) and label not in choices:
        letter = letters[int(label)]
    if letter is None and label:
        same = [i for i, choice in enumerate(choices) if _plain(choice) == _plain(label)]
        letter = letters[same[0]] if same and same[0] < len(letters) else None
    texts = [str(sample.metadata[name]) for name in ("correct_answer", "answer_text") if sample.metadata.get(name)]
    if letter in letters and (place := letters.index(letter)) < len(choices):
        texts.append(choices[place])
    if len(label) > 1:
        texts.append(label)
    if letter is None and not texts:
        raise ValueError(
            "gpqa needs a label that is one of the choices, or correct_letter in the metadata, and the row has "
            f"{sample.label!r}"
        )
    return letter, texts


def _letter(text: str, letters: Sequence[str]) -> str | None:
    for pattern in _NAMED:
        for found in pattern.findall(text):
            if (letter := "".join(found).upper()) in letters:
                return letter
    capitals = [letter for letter in _CAPITAL.findall(text) if letter in letters]
    return capitals[-1] if capitals else None


def _holds(text: str, words: str) -> bool:
    return bool(words) and f" {words} " in f" {text} "


def _plain(text: str) -> str:
    """Its words and numbers, in small letters."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()
