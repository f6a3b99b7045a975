"""The choice that a response names is the label: for rows of slime's `gpqa`, whose prompts prescribe less form than
those of `multiple_choice`.

The letter is the one that the last sentence of the form `the answer is C` or `C is correct` names, else the one that
the last clause names alone: see `cairn.tasks.rewards.choices`. A response that names no letter is right if it contains
the text of the right choice, as words, and denies nothing. The right choice is given by the label, a letter or the text
of a choice, or by `correct_letter` in the row's metadata. `choices` or `valid_letters` in the metadata define which
letters count, else A to J.

| | slime's `gpqa` | here |
|---|---|---|
| `Option A is wrong. The answer is C` | A: the first mention counts | C: the last statement does |
| `the answer is A or B`, `not B` | A; B | no answer |
| a word after `answer is`, as in `the answer is clear` | its first letter is the answer: C | is no letter |
| small letters | count after `answer`, in words too | count only alone after `answer is` |
| the label 2 | C where it is a number, a text where it is a string | C, unless a choice is `2` |
| thoughts without an end | are searched for a letter | contain no answer |
| the right choice's text, where no letter is named | may be a part of words | must be whole words |
| the texts of several choices, where no letter is named | are right if the right one is among them | name none |
| a label that is no choice | counts as a text | fails the sample, if it is a letter |
"""

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.choices import denies, letter_of, plain
from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> dict[str, Any]:
    """Return 1 if the right choice is named, else 0. Raises ValueError where the row does not say which is right."""
    choices = _choices(sample.metadata)
    letters = _letters(sample.metadata, choices)
    right, texts = _right(sample, choices, letters)
    final = answer_of(sample)
    answer = letter_of(final, letters)
    if answer is not None and right is not None:
        return {"reward": float(answer == right), "answer": answer or None}
    words = plain(final)
    right_texts = [text for text in map(plain, texts) if _holds(words, text)]
    named = [text for text in map(plain, choices) if _holds(words, text)]
    alone = all(any(_holds(text, other) for text in right_texts) for other in named)
    return {"reward": float(bool(right_texts) and alone and not denies(final)), "answer": answer or None}


def _choices(metadata: dict[str, Any]) -> list[str]:
    choices = metadata.get("choices") or ()
    return [str(choice) for choice in (choices.values() if isinstance(choices, dict) else choices)]


def _letters(metadata: dict[str, Any], choices: Sequence[str]) -> list[str]:
    valid_letters = metadata.get("valid_letters")
    return (
        [str(letter).upper() for letter in valid_letters]
        if valid_letters
        else list(ascii_uppercase[: len(choices) or 10])
    )


def _right(sample: Sample, choices: Sequence[str], letters: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the letter of the right choice, if it is known, and texts that mean this choice."""
    label, correct = (sample.label or "").strip(), sample.metadata.get("correct_letter")
    letter = correct.strip().upper() if isinstance(correct, str) and correct.strip() else None
    if letter is None and label.strip("()").upper() in letters:
        letter = label.strip("()").upper()
    if letter is None and label.isdecimal() and int(label) < len(letters) and label not in choices:
        letter = letters[int(label)]
    if letter is None and label:
        same = [i for i, choice in enumerate(choices) if plain(choice) == plain(label)]
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


def _holds(text: str, words: str) -> bool:
    return bool(words) and f" {words} " in f" {text} "
