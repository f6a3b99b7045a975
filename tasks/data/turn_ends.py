"""Where an assistant's turn ends: the tokens that a model has to say to stop."""

from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any

from cairn.engines.tokenizers import special_ids


class TurnEnds:
    """What is learned behind the words of a turn.

    | behind the words, before any other word, stands | learned |
    |---|---|
    | an end token of the model | through the first |
    | none, but the chat template closes turns with special tokens | through the first special one |
    | neither, and the chat ends there | an end token, which is put there |
    | neither, and the chat goes on | nothing |
    """

    def __init__(self, tokenizer: Any, model_ends: Collection[int]) -> None:
        """`model_ends`: the tokens at which engines stop (`cairn.engines.models.end_tokens`)."""
        own = tokenizer.eos_token_id
        self.ids = frozenset(model_ends) | ({own} if own is not None else set())
        """Tokens that end a response."""
        self.special = special_ids(tokenizer) | self.ids
        self.closes = True
        """Whether the chat template closes a turn that nothing follows with a special token."""
        self.default: int | None = own if own in model_ends or not model_ends else min(model_ends)
        """What is put behind a turn that has no end; None where the model has none."""
        self._tokenizer = tokenizer

    def look_at(self, closing: Sequence[int], opening: Sequence[int]) -> None:
        """Learn from the chat template: what it writes behind an answer that nothing follows, and behind one that a
        question follows. A template that closes nothing ends a turn by beginning the next, as that of GLM-4.5 does."""
        self.closes = any(id in self.special for id in self._gap(closing))
        self.default = next((id for id in self._gap(opening) if id in self.ids), self.default)

    def length(self, following: Sequence[int]) -> int:
        """How many of the tokens behind a turn's words end it."""
        gap = self._gap(following)
        for wanted in (self.ids, self.special if self.closes else frozenset()):
            first = next((place for place, id in enumerate(gap) if id in wanted), None)
            if first is not None:
                return first + 1
        return 0

    def has_ended(self, said: Sequence[int], by: Collection[int]) -> bool:
        """Whether one of the tokens `by` stands at the end of a turn, with only special ones and space behind."""
        return any(id in by for id in self._gap(said[::-1]))

    def _gap(self, ids: Iterable[int]) -> list[int]:
        """The tokens before the first that is a part of a word."""
        return list(takewhile(lambda id: id in self.special or not self._tokenizer.decode([id]).strip(), ids))
