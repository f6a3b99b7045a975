"""How requests are given to an engine that generates for several askers at a time."""

from collections.abc import Sequence
from typing import Protocol

from cairn.engines.types import Completion, GenerateRequest


class Stream(Protocol):
    """The requests of one asker, and an iterator over what becomes of them, as it comes: in lists of what ended
    together. It ends when everything has, and goes on where more is asked.

    One thread iterates; the other methods may be called from any.

    Raises, in `__next__`:
        GenerationFailed: the weights give no finite logits for a sample, or the engine, alive, failed on one.
        RequestRefused: the engine found out late that it cannot serve some; the others come with what follows.
        EngineError: the engine is not to be reached.
    """

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Generate a sample for each request, beside whatever the engine is at work on.

        Raises:
            RequestRefused: some cannot be served; nothing of the call is generated.
            EngineError: the weights are being updated or their memory is released.
        """

    def __iter__(self) -> "Stream": ...

    def __next__(self) -> list[Completion]: ...

    def abort(self) -> None:
        """End all requests soon, and those at once that come later: each gives what it has of its sample, with finish
        reason ABORT."""

    def close(self) -> None:
        """Give up what has not ended; the engine is then at work on none of it."""
