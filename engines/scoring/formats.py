"""What the wire formats have in common."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

ROUNDING = 1e-3
"""By how much a log-prob may be above 0."""


class NotAsAsked(ValueError):
    """An answer is not what was asked for. The message is the end of a sentence on the answer."""


Spell = Callable[[int], str]
"""The text of one token."""


@dataclass(frozen=True)
class Scored:
    """The end of a sequence as a server has read it."""

    log_probs: list[Any]
    """One for each token …"""
    ids: list[Any] | None
    """… and which token it is, where the server says …"""
    texts: list[Any] | None
    """… or else its text."""
    top: list[Any] | None = None
    """Pairs of log-prob and id of the most probable tokens in the place of each, where they were asked for."""

    def of(self, ids: Sequence[int], spell: Spell) -> np.ndarray:
        """[T] float32: the log-probs, if they are of just these tokens. Raises NotAsAsked, which names the first token
        that is another or has no log-prob."""
        said = self.texts if self.ids is None else self.ids
        if said is None or not len(said) == len(self.log_probs) == len(ids):
            raise NotAsAsked(f"has {len(self.log_probs)} log-probs for {len(ids)} tokens")
        for place, (token, found) in enumerate(zip(ids, said, strict=True)):
            if self.ids is not None and found != token:
                raise NotAsAsked(f"is of token {found!r} where token {token} was given, at {place} of {len(ids)}")
            # A token that is a part of a character has no text of its own, and servers spell it in many ways.
            if self.ids is None and found != (text := spell(token)) and "\N{REPLACEMENT CHARACTER}" not in text:
                raise NotAsAsked(
                    f"is of {found!r} where {text!r} was given, at {place} of {len(ids)}: it has another tokenizer"
                )
        for place, value in enumerate(self.log_probs):
            if not isinstance(value, int | float) or not -math.inf < value <= ROUNDING:
                raise NotAsAsked(f"has {value!r} in the place of a log-prob, at {place} of {len(ids)}")
        return np.array(self.log_probs, np.float32)

    def top_of(self, k: int) -> np.ndarray:
        """[T, 2k] float32: log-probs of the k most probable tokens, and their ids. Raises NotAsAsked where there are
        not as many."""
        pairs = np.array([[entry[:2] for entry in entries] for entries in self.top or ()], np.float32)
        if pairs.shape != (len(self.log_probs), k, 2) or not (np.isfinite(pairs).all() and (pairs[..., 1] >= 0).all()):
            raise NotAsAsked(f"has no log-probs of the {k} most probable tokens at each of {len(self.log_probs)}")
        return np.concatenate([pairs[..., 0], pairs[..., 1]], 1)


class Format(Protocol):
    """How a server is asked for the log-probs of tokens that it is given."""

    path: str
    """Of its address."""

    def body(self, name: str, ids: Sequence[int], scored: int, top_k: int = 0) -> dict[str, Any]:
        """What is posted: `ids` are prompt and response, the last `scored` of them are wanted, with the `top_k` most
        probable tokens in the place of each."""

    def read(self, answer: Any, given: int, scored: int) -> Scored:
        """What the answer says of the last `scored` of `given` tokens. Raises KeyError, IndexError, TypeError or
        ValueError where it is no such answer."""
