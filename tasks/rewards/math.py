r"""The answer is right if it is mathematically equal to the label, as math-verify judges it.

The answer is what stands in the response's last `\boxed{…}`, else the last expression that math-verify finds in a
response that was not cut off. What was thought does not count, and a response that ends within its thoughts or a box
has no answer. The label is the bare answer in LaTeX or plain numbers (`72`, `\frac{1}{2}`), or a text with the answer
in `\boxed{…}`.

Before math-verify sees it, `cairn.tasks.rewards.notation` undoes how an answer is written. Where others decide
otherwise:

| | lm-evaluation-harness (`minerva_math`), verl (`math_dapo`) | slime (`math_utils`) | here |
|---|---|---|---|
| where it stands | behind `Answer:` or `The final answer is` | in the last box | in the last box |
| `5=6=18`, label 18 | right: what follows the last `=` | wrong: text with `=` | wrong: it says that 5 is 6 |
| `y=3x=18` | right | wrong: one `=`, behind at most two letters | right |
| `36/2`, label 18 | right in Minerva, wrong in verl: compared as text | wrong: the label is an integer | right |
| units | a list of words, removed wherever they stand | the same | removed behind a number, if the label is one |
| `0.333`, label 1/3 | wrong | wrong | wrong; right from six digits on, as math-verify rounds |
| `\frac13 \approx 0.333`, label 1/3 | no rule | no rule | right: what is exact comes first |
"""

from functools import lru_cache

from cairn.tasks.rewards import equality, notation
from cairn.tasks.rewards.boxed import final_answer, last_boxed
from cairn.tasks.rewards.sample import Sample


def grade(sample: Sample) -> float:
    """1 if the answer equals the label, else 0, also without an answer. ValueError without a usable label."""
    if sample.label is None:
        raise ValueError("math needs a label, and the row has none")
    answer = final_answer(sample)
    return float(is_right(answer or "", sample.label))


def is_right(answer: str, label: str) -> bool:
    """Whether an answer, such as the text of a box, is proved to equal the label; an empty one equals none. ValueError
    without a usable label."""
    expected, expected_unit = _label(label)
    said, unit = notation.read(answer)
    if not said or (unit and expected_unit and unit != expected_unit):
        return False
    if notation.closed_up(said) == notation.closed_up(expected):
        return True
    texts = notation.text_only(expected), notation.text_only(said)
    return texts[0] == texts[1] if texts != (None, None) else equality.are_equal(expected, said)


@lru_cache(maxsize=1024)
def _label(label: str) -> tuple[str, str]:
    """The answer that a label holds, and its unit."""
    boxed = last_boxed(label)
    found = notation.read(label if boxed is None else boxed)
    if not found[0]:
        raise ValueError(f"math finds no expression in the label {label!r}")
    return found
