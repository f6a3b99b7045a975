r"""Find the answer in a sample.

Text that a model writes while it thinks is no answer. A box that the end of the response cuts off is none either:
`\boxed{18` might have become 185.
"""

import re
from dataclasses import replace

from cairn.tasks.rewards.sample import Sample

_OPEN, _CLOSE = "<think>", "</think>"
_MARK = re.compile(r"\\(?:boxed|fbox)\s{0,9}\{|\\(?!\\boxed|\\fbox)[\s\S]|[{}]")
"""A box, or a brace; one that is escaped groups nothing."""
_END = 64
"""Usual maximum of characters of the special tokens at a response's end."""
_LAST = 1000
"""Characters at the end of a text in which a sentence is searched."""
_STATEMENT = re.compile(
    r".*?(?:\$\$?(?P<dollar>[^$]+)\$\$?|\\\((?P<round>.*?)\\\)|\\\[(?P<square>.*?)\\\])(?P<unit>[^$\d]*)|"
    r"(?:.*?\b(?:is|are|was|equals?|gets?|has|have|pays?|costs?|makes?|needs?|earns?|spends?|total)\b|.*:)? *"
    r"(?P<words>[^$:]*?\d[^$:]*)"
)
_ASIDE = re.compile(r", (?:I (?:think|believe|guess|am sure)|of course|as (?:required|desired|claimed|expected))$")
_DENIED = re.compile(
    r"\b(?:not|no|never|neither|nor|or|either|cannot|if|unless|without|between|than|except|least|most)\b|n['’]t\b", re.I
)


class UnclosedBox(ValueError):
    """The text ends within its last box."""


def answer_of(sample: Sample) -> str:
    """Return what a sample says after its thoughts; nothing if it ended, or was cut off, within them.

    A chat template may have opened the thoughts at the end of the prompt.
    """
    opened = sample.prompt.rstrip().endswith(_OPEN)
    marked = sample.response_with_special_tokens
    if not any(tag in marked and tag not in sample.response for tag in (_OPEN, _CLOSE)):
        return after_thinking(sample.response, opened)
    # The tags are special tokens of this tokenizer, so the response is without them, and without the end token.
    answer = after_thinking(marked, opened)
    return answer[: _overlap(sample.response, answer)] or answer


def in_box(sample: Sample) -> Sample:
    """Return the sample with the content of its last box after the thoughts as its response; an empty one without a
    whole box."""
    boxed = whole_box(answer_of(sample))
    finish_reason = sample.finish_reason if boxed is None else "stop"  # a whole box is whole, whatever followed it
    return replace(
        sample, response=boxed or "", response_with_special_tokens="", prompt="", finish_reason=finish_reason
    )


def after_thinking(text: str, opened: bool = False) -> str:
    """Return what follows the last `</think>`, or nothing if the text ends within its thoughts.

    A text without thoughts is returned whole, unless they were `opened` before it.
    """
    _, closed, answer = text.rpartition(_CLOSE)
    return "" if _OPEN in answer or (opened and not closed) else answer


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{…}` (or `\fbox{…}`), the innermost of nested boxes; None without a box.

    Raises UnclosedBox if the text ends before a box does.
    """
    unclosed: list[int] = []
    """Start of the content of each open box; 0 for each open brace within a box."""
    last: tuple[int, int] | None = None
    for mark in _MARK.finditer(text):
        if "box" in mark[0]:
            unclosed.append(mark.end())
        elif mark[0] == "{" and unclosed:
            unclosed.append(0)
        elif mark[0] == "}" and unclosed:
            begin = unclosed.pop()
            if begin and (last is None or begin > last[0]):
                last = begin, mark.start()
    if unclosed:
        raise UnclosedBox("the text ends within a box")
    return None if last is None else text[last[0] : last[1]]


def whole_box(text: str) -> str | None:
    """Return the content of the last box; None without a box, and if the text ends within it."""
    try:
        return last_boxed(text)
    except UnclosedBox:
        return None


def final_answer(sample: Sample) -> str | None:
    """Return the answer that a sample gives after its thoughts; None without an answer.

    The answer is the content of the last box, else what `stated_answer` finds in a response that was not cut off.
    """
    final = answer_of(sample)
    try:
        boxed = last_boxed(final)
    except UnclosedBox:
        return None
    if boxed is not None:
        return boxed
    return None if sample.truncated else stated_answer(final)


def stated_answer(text: str) -> str | None:
    """Return what the last sentence with a number or a formula says.

    That is the formula at its end, with the unit after it; or the text after a word such as `is`; or the whole sentence
    if it is nothing else. None where the sentence does not say what the answer is, denies it, or names alternatives.
    """
    sentences = re.split(r"(?<=[.!?]) +|\n+", re.sub(r"\*\*|__|\\boxed\b", "", text[-_LAST:]))
    sentence = next((one.strip() for one in reversed(sentences) if re.search(r"[\d$]|\\[(\[]", one)), "")
    sentence = _ASIDE.sub("", sentence.rstrip(".!? "))
    match = _STATEMENT.fullmatch(sentence)
    if match is None or _DENIED.search(sentence):
        return None
    formula = match["dollar"] or match["round"] or match["square"]
    return match["words"] if formula is None else formula + (match["unit"] or "")


def _overlap(text: str, answer: str) -> int:
    """Return the length of the longest prefix of `answer` that ends `text`, by Knuth, Morris and Pratt."""
    for end in range(len(answer), max(0, len(answer) - _END), -1):
        if text.endswith(answer[:end]):
            return end
    borders, matched = [0], 0
    for char in answer[1:]:
        while matched and char != answer[matched]:
            matched = borders[matched - 1]
        matched += char == answer[matched]
        borders.append(matched)
    matched = 0
    for char in text[-len(answer) :] if answer else "":
        while matched and (matched == len(answer) or char != answer[matched]):
            matched = borders[matched - 1]
        matched += char == answer[matched]
    return matched
