"""Strings that end a response as soon as its text holds one.

The text is what the model folder's tokenizer makes of all tokens, special ones kept, as SGLang has it. A string may
begin and end in the middle of tokens, and a character may take several. Only the end of a response is decoded: each
token that has a text has a byte of it at least, so a string that the last token completes lies in as many of the last
tokens as it has bytes. What is found depends on the response alone.
"""

from collections import deque
from functools import cached_property
from typing import Any

from cairn.engines.errors import BadModel
from cairn.engines.tokenizers import read_tokenizer
from cairn.engines.types import GenerateRequest

_CHARACTER = 4
"""Most bytes of a character in UTF-8, so most tokens."""
_PART = "\ufffd"
"""What a part of a character is decoded to."""


class StopStrings:
    """Those of an engine's requests. The tokenizer is loaded where a request has some.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._texts: dict[int, bool] = {}

    def watch(self, request: GenerateRequest) -> "StopWatch | None":
        """A look-out for the request's strings, None where it has none. Raises BadModel."""
        strings = request.sampling_params.stop
        if not strings:
            return None
        _ = self._tokenizer  # what it lacks concerns this request, and not those that are decoded with it
        watch = StopWatch(self, strings)
        drawn = len(request.input_ids) - request.position
        for token in request.input_ids[drawn:][-watch.reach :]:
            watch.extend(int(token))
        return watch

    def text(self, tokens: list[int]) -> str:
        """Of some tokens."""
        return str(self._tokenizer.decode(tokens))

    def has_text(self, token: int) -> bool:
        """Whether a token has any, in whatever company: an id that the tokenizer lacks has none. Some tokenizers drop a
        space before the first token, so it is asked of two."""
        if token not in self._texts:
            self._texts[token] = bool(self.text([token, token]))
        return self._texts[token]

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            tokenizer = read_tokenizer(self._folder)
        # The library reports a broken tokenizer with whatever its many tokenizer classes raise.
        except Exception as error:
            raise BadModel(f"{self._folder} has no tokenizer that can be loaded, for stop strings: {error}") from error
        if not tokenizer("0")["input_ids"]:  # the library makes one up where there is none
            raise BadModel(f"{self._folder} has no tokenizer, which stop strings need: put the model's own there")
        return tokenizer


class StopWatch:
    """The end of one response."""

    def __init__(self, vocabulary: StopStrings, strings: tuple[str, ...]) -> None:
        self._vocabulary = vocabulary
        self._strings = strings
        self.reach = _CHARACTER + max(len(string.encode()) for string in strings)
        """Tokens that are decoded: more than a string can lie in, since the first may lose a space, and may begin in
        the middle of a character, which some tokenizers give up with all the bytes after it."""
        self._last: deque[int] = deque(maxlen=self.reach)
        self.found = False
        """Whether the last token has completed a string."""

    def extend(self, token: int) -> None:
        """Go on by a token."""
        if self._vocabulary.has_text(token):
            self._last.append(token)

    def completes(self, token: int) -> bool:
        """Go on by a token; whether it completes a string."""
        self.extend(token)
        tokens = [*self._last]
        for start in range(_CHARACTER):
            text = self._vocabulary.text(tokens[start:])
            self.found = any(string in text for string in self._strings)
            if self.found or not text.startswith(_PART):
                break
        return self.found
