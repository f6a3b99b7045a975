"""How much of the label's words a response has, and how much else: the token F1 of SQuAD (Rajpurkar et al. 2016,
arXiv:1606.05250, section 4.2), with the rule of HotpotQA (Yang et al. 2018, arXiv:1809.09600) for yes and no.

Words count as often as they stand, without case, punctuation and the articles a, an, the. Of the words that both have
precision is the share in the response, recall the share in the label, and F1 = 2 · precision · recall / (precision +
recall). Where the response or the label is `yes`, `no` or `noanswer` and the other is not the same, it is 0.

What a response says behind its thoughts counts; slime's `f1` counts its thoughts too. `boxed_f1` takes the last box.
"""

import re
import string
from collections import Counter

from cairn.tasks.rewards.boxed import answer_of
from cairn.tasks.rewards.sample import Sample

_CLOSED = frozenset({"yes", "no", "noanswer"})
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def grade(sample: Sample) -> dict[str, float]:
    """F1, from 0 to 1, with `precision` and `recall`. ValueError without a label that has words."""
    if sample.label is None:
        raise ValueError("f1 needs a label, and the row has none")
    said, wanted = _words(answer_of(sample)), _words(sample.label)
    if not wanted:
        raise ValueError(f"f1 needs a label with words besides articles, and the row has {sample.label!r}")
    shared = (Counter(said) & Counter(wanted)).total()
    differs = said != wanted and not _CLOSED.isdisjoint((" ".join(said), " ".join(wanted)))
    if not shared or differs:
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0}
    precision, recall = shared / len(said), shared / len(wanted)
    return {"reward": 2 * precision * recall / (precision + recall), "precision": precision, "recall": recall}


def _words(text: str) -> list[str]:
    return re.sub(r"\b(?:a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()
