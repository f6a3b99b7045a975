r"""Finding the answer in a sample.

What a model writes while it thinks is no answer, and neither is a box that the end of the response cuts off:
`\boxed{18` may have been going to be 185.
"""

import re
from dataclasses import replace

from cairn.tasks.rewards.sample import Sample

_OPEN, _CLOSE = "<think>", "</think>"
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace groups nothing


class UnclosedBox(ValueError):
    """The text ends within its last box."""


def answer_of(sample: Sample) -> str:
    """What a sample says behind its thoughts; nothing if it ended, or was cut off, within them.

    A chat template may have opened them, at the end of the prompt.
    """
    opened = sample.prompt.rstrip().endswith(_OPEN)
    marked = sample.response_with_special_tokens
    if not any(tag in marked and tag not in sample.response for tag in (_OPEN, _CLOSE)):
        return after_thinking(sample.response, opened)
    # To this tokenizer the tags are special tokens, which the response is without, as it is without the end token.
    answer = after_thinking(marked, opened)
    parts = (answer[:end] for end in range(len(answer), 0, -1))
    return next((part for part in parts if sample.response.endswith(part)), answer)


def in_box(sample: Sample) -> Sample:
    """The sample with what stands in its last box behind its thoughts in the place of its response; nothing if there is
    no whole box."""
    try:
        boxed = last_boxed(answer_of(sample))
    except UnclosedBox:
        boxed = None
    finish_reason = sample.finish_reason if boxed is None else "stop"  # a whole box is whole, whatever followed it
    return replace(
        sample, response=boxed or "", response_with_special_tokens="", prompt="", finish_reason=finish_reason
    )


def after_thinking(text: str, opened: bool = False) -> str:
    """What follows the last `</think>`; nothing of a text that ends within its thoughts. All of one that has none,
    unless they were `opened` before it."""
    _, closed, answer = text.rpartition(_CLOSE)
    return "" if _OPEN in answer or (opened and not closed) else answer


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{…}` (or `\fbox{…}`), the innermost where boxes are nested; None without one.

    Raises UnclosedBox if the text ends before a box does.
    """
    found, position = None, 0
    while box := _BOX.search(text, position):
        position = _end_of_group(text, box.end())
        found = text[box.end() : position - 1]
    if found is None:
        return None
    within = last_boxed(found)
    return found if within is None else within


def _end_of_group(text: str, begin: int) -> int:
    """Where the group that began before `begin` has ended."""
    depth = 1
    for brace in _BRACE.finditer(text, begin):
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return brace.end()
    raise UnclosedBox("the text ends within a box")
