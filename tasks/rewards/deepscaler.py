r"""The box after the thoughts is mathematically equal to the label: DeepScaleR's rule (Luo et al. 2025), slime's
`deepscaler`. A response without a mark for the end of its thoughts, `</think>` or `###Response`, gets 0, and so does
one without a box after the mark.

Equality has to be proved, as in the grader `math`:

| | slime: Hendrycks's `is_equiv`, then sympy | here |
|---|---|---|
| `2/4`, label `1/2` | wrong: fractions have to be reduced | right |
| `36/2`, label `18` | wrong: where the label is an integer nothing is computed | right |
| `\{2, 1\}`, label `\{1, 2\}` | wrong | right |
| `y = 3x = 18`, label `18` | wrong: one `=`, after at most two letters | right |
| `\sin^2 1 + \cos^2 1`, label `1` | wrong | right |
| `5\%`, label `5` | right: percent signs are removed | wrong |
| `###Response` twice | the text between the two counts | the text after the last counts |
| no label | 0 | the sample fails |
"""

from cairn.configs.kinds import plugin
from cairn.tasks.rewards.boxed import UnclosedBox, answer_of, last_boxed
from cairn.tasks.rewards.math import is_right
from cairn.tasks.rewards.sample import Sample, required_label

_CLOSE, _RESPONSE = "</think>", "###Response"


@plugin(library="math-verify", mark="`</think>` or `###Response`")
def grade(sample: Sample) -> float:
    """Return 1 if the box equals the label, else 0. Raises ValueError without a usable label."""
    label = required_label(sample, "deepscaler")
    try:
        boxed = last_boxed(_behind_the_mark(sample))
    except UnclosedBox:
        return 0.0
    return float(is_right(boxed or "", label))


def _behind_the_mark(sample: Sample) -> str:
    if any(_CLOSE in text for text in (sample.response, sample.response_with_special_tokens)):
        return answer_of(sample)
    _, marked, answer = sample.response.rpartition(_RESPONSE)
    return answer if marked else ""
