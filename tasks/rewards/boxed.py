r"""Finding the answer in a response.

What a model writes while it thinks is no answer, and neither is a box that the end of the response cuts off:
`\boxed{18` may have been going to be 185.
"""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace groups nothing


class UnclosedBox(ValueError):
    """The text ends within its last box."""


def after_thinking(text: str) -> str:
    """What follows the last `</think>`; all of a text that has none, nothing of one that ends within its thoughts."""
    answer = text.rpartition("</think>")[2]
    return "" if "<think>" in answer else answer


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
