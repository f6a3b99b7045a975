"""The texts of tokens, by the tokenizer of the run that made them, if that is where the run had it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 8
"""Tokens that one character may be made of, in any tokenizer that falls back to bytes."""


class Texts:
    """The text of each token of a response, so that all together are the response."""

    def __init__(self, tokenizer: Any) -> None:
        """A tokenizer of Transformers."""
        self._tokenizer = tokenizer
        self._alone: dict[int, str] = {}

    def __call__(self, ids: np.ndarray) -> list[str]:
        """A text a token; "" for one that only begins or goes on with a character that a later one ends."""
        listed = ids.tolist()
        for one in set(listed) - self._alone.keys():
            self._alone[one] = self._decode([one])
        texts = [self._alone[one] for one in listed]
        return texts if "".join(texts) == self._decode(listed) else self._in_company(listed)

    def are_of(self, ids: np.ndarray, response: str) -> bool:
        """Whether this tokenizer makes the response of the ids: another model may lie at the place by now."""
        return self._decode(ids.tolist(), skip_special_tokens=True) == response

    def whole(self, ids: np.ndarray) -> str:
        """The text of tokens that belong together, special ones included."""
        return self._decode(ids.tolist())

    def _in_company(self, ids: Sequence[int]) -> list[str]:
        """As `__call__`, for tokens whose texts depend on those before them."""
        texts, begin, shown = [], 0, ""
        for end in range(1, len(ids) + 1):
            text = self._decode(ids[begin:end])
            is_part = text.endswith(_REPLACEMENT) and end < len(ids) and end - begin < 2 * _LONGEST_CHARACTER
            texts.append("" if is_part else text[len(shown) :])
            if not is_part:
                # One token of the past is enough to decode the next as it is decoded in its place.
                begin, shown = end - 1, self._decode(ids[end - 1 : end])
        return texts

    def _decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)


def texts_of(model: str, tried: Iterable[tuple[np.ndarray, str]]) -> Texts | None:
    """Those of the tokenizer in a model's folder; None where there is none, or it makes other texts of the ids that are
    `tried`, each with the response that the run made of them."""
    from cairn.engines.errors import BadModel
    from cairn.flows.driver.validation import load_tokenizer

    try:
        texts = Texts(load_tokenizer(model))
    except BadModel:
        return None
    return texts if all(texts.are_of(ids, response) for ids, response in tried) else None
