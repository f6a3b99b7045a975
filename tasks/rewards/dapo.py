r"""The text after the last `Answer:` is the label, an integer, after both are normalised: +1, else −1.

This is the reward of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 7), as slime and verl compute it: in the last 300
characters, the text after `Answer:` up to the end of its line, normalised as for Minerva (Lewkowycz et al. 2022,
arXiv:2206.14858, appendix D.1), is compared as text.

| | slime, verl | here |
|---|---|---|
| `Answer:` in thoughts | counts | does not |
| the line of the answer, where a response was cut off in it | counts | does not: `18` might have become 185 |
| a label that is no number | ends the run | fails the sample |
| a label with decimals, as `18.5` | is cut to 18 | fails the sample; `18.0` is 18 |
| a label beyond 2⁵³ | loses its last digits | keeps them |
| special tokens in the text | two are removed by name | the text is without them |
| words that are removed wherever they are, as in `1points8`, `1 8`, `1, 8` | 18 | wrong |
| text next to a formula, as in `not $18$`, `$18$ or $19$`, `$18$ million` | is removed: 18 | wrong |
| text before the last `=`, as in `x = 17, y = 18`, `17 = 18`, `2x = 18` | is removed: 18 | wrong |

So an answer is right if slime and verl accept it, and if the whole line is that integer and at most a name before `=`
and a unit that `cairn.tasks.rewards.notation` knows.
"""

import re
from decimal import Decimal
from typing import Any

from cairn.configs.kinds import plugin
from cairn.tasks.rewards import notation
from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample

_LAST = 300
"""Characters at the end in which the answer is searched. The longest answer of MATH-500 has 159."""
_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_NONE = "[INVALID]"
_REPLACED = {
    "an ": "",
    "a ": "",
    ".$": "$",
    r"\$": "",
    r"\ ": "",
    " ": "",
    "mbox": "text",
    r",\text{and}": ",",
    r"\text{and}": ",",
    r"\text{m}": r"\text{}",
}
_REMOVED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3"),
    *("\\text{\n}", r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)


@plugin(mark="`Answer:`", pays=(-1.0, 1.0))
def grade(sample: Sample) -> dict[str, Any]:
    """Return the reward, +1 or −1.

    `score` is the same, `acc` says whether the answer is right, and `pred` is the answer as it was compared. Raises
    ValueError where the label is no integer.
    """
    expected = _integer(sample.label)
    final = answer_of(sample)
    if sample.truncated:
        final = final[: final.rfind("\n") + 1]
    answers = _ANSWER.findall(final[-_LAST:])
    line = answers[-1] if answers else _NONE
    answer = normalised(line)
    right = answer == expected and notation.integer(_in_box(line)) == int(expected)
    score = 1.0 if right else -1.0
    return {"reward": score, "score": score, "acc": right, "pred": answer}


def normalised(answer: str) -> str:
    """Return an answer in Minerva's normal form: the text after its last `=`, without words, units and LaTeX markup,
    and with braces in fractions and roots."""
    answer = answer.rpartition("=")[2]
    for written, read in _REPLACED.items():
        answer = answer.replace(written, read)
    for text in _REMOVED:
        answer = answer.replace(text, "")
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    answer = re.sub(r"\\boxed\{(.*)\}", r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def _in_box(line: str) -> str:
    """Return the content of a line's only box if the line contains nothing else, else the line."""
    boxed = re.fullmatch(r"\$?\s*\\boxed\{([^{}]*)\}\s*\$?", line.strip())
    return line if boxed is None else boxed[1]


def _integer(label: str | None) -> str:
    written = normalised(label or "")
    try:
        value = Decimal(written)
        if value == int(value):
            return str(int(value))
    except (ArithmeticError, ValueError):
        pass
    raise ValueError(f"dapo needs an integer as the label, and the row has {label!r}")
