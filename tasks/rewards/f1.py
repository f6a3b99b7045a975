"""Token F1 of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250, section 4.2): the overlap of the response's words with
the label's. For yes and no the rule of HotpotQA applies (Yang et al. 2018, arXiv:1809.09600).

Each occurrence of a word counts; case, punctuation and the articles a, an, the do not. Precision is the share of the
response's words that the label has too, recall the share of the label's words that the response has too, and
F1 = 2 · precision · recall / (precision + recall). Where the response or the label is `yes`, `no` or `noanswer` and the
other differs, it is 0.

Only text after the thoughts counts; slime's `f1` counts thoughts too. `boxed_f1` reads the last box.
"""

import re
import string
from collections import Counter

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample, required_label

_CLOSED = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(sample: Sample) -> dict[str, float]:
    """Return F1, from 0 to 1, with `precision` and `recall`. Raises ValueError without a label that contains words."""
    label = required_label(sample, "f1")
    words, wanted = _words(answer_of(sample)), _words(label)
    if not wanted:
        raise ValueError(f"f1 needs a label with words besides articles, and the row has {label!r}")
    shared = (Counter(words) & Counter(wanted)).total()
    differs = words != wanted and not _CLOSED.isdisjoint((" ".join(words), " ".join(wanted)))
    if not shared or differs:
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0}
    precision, recall = shared / len(words), shared / len(wanted)
    return {"reward": 2 * precision * recall / (precision + recall), "precision": precision, "recall": recall}


def _words(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
