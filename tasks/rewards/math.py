r"""The answer is right if it can be proved to equal the label; `cairn.tasks.rewards.equality` defines what is equal.

The answer is the content of the response's last `\boxed{…}`, else what the last sentence with a number or a formula
says, in a response that was not cut off. Thoughts do not count, and a response that ends within its thoughts or a box
has no answer. The label is the bare answer in LaTeX or plain numbers (`72`, `\frac{1}{2}`), or a text with the answer
in `\boxed{…}`.

`cairn.tasks.rewards.notation` normalises the notation of an answer. The rest has to be read as a whole, so that nothing
that changes its meaning is ignored. Where others decide otherwise:

| | lm-evaluation-harness (`minerva_math`), verl (`math_dapo`) | slime (`math_utils`) | here |
|---|---|---|---|
| place of the answer | after `Answer:` or `The final answer is` | in the last box | in the last box |
| `5=6=18`, label 18 | right: the text after the last `=` | wrong: text with `=` | wrong: it says that 5 is 6 |
| `y=3x=18` | right | wrong: one `=`, after at most two letters | right |
| `2x=18` | right | right | wrong: it says that x is 9 |
| `36/2`, label 18 | right in Minerva, wrong in verl: compared as text | wrong: the label is an integer | right |
| units | a list of words, removed wherever they are | the same | after a number; another than the label's is wrong |
| `10\%`, label 10 | right | right | wrong, and so is `10` for `10\%`: `0.1` is right |
| `x=-3 or x=3`, label 3 | right: the text after the last `=` | wrong | wrong: there are two |
| `0.333333`, label 1/3 | wrong; math-verify: right | wrong | wrong: decimals are exact |
| `\frac13 \approx 0.333`, label 1/3 | no rule | no rule | right: the exact part counts |
"""

from functools import lru_cache

from cairn.configs.kinds import plugin
from cairn.tasks.rewards import notation
from cairn.tasks.rewards.boxed import final_answer, last_boxed
from cairn.tasks.rewards.sample import Sample, required_label


@plugin(library="math-verify")
def grade(sample: Sample) -> float:
    """Return 1 if the answer equals the label, else 0, also without an answer. Raises ValueError without a usable
    label."""
    label = required_label(sample, "math")
    answer = final_answer(sample)
    return float(is_right(answer or "", label))


def is_right(answer: str, label: str) -> bool:
    """Whether an answer, such as the text of a box, is proved to equal the label; an empty one equals none.

    Raises ValueError without a usable label.
    """
    expected, expected_unit = _label(label)
    read, unit = notation.read(answer)
    if not read or (unit and expected_unit and unit != expected_unit):
        return False
    if notation.closed_up(read) == notation.closed_up(expected):
        return True
    texts = notation.text_only(expected), notation.text_only(read)
    if texts != (None, None):
        return texts[0] == texts[1]
    from cairn.tasks.rewards import equality  # SymPy takes long to import

    return equality.are_equal(expected, read)


@lru_cache(maxsize=1024)
def _label(label: str) -> tuple[str, str]:
    """Return the answer in a label, and its unit."""
    boxed = last_boxed(label)
    answer = notation.read(label if boxed is None else boxed)
    if not answer[0]:
        raise ValueError(f"math finds no expression in the label {label!r}")
    return answer
