"""Keepers of samples: objects in the process of an engine that take what it generates. So their users, in other
processes, handle the ends of samples and no tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from cairn.engines.types.trajectories import GeneratedSample, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound="Keeper")
K_co = TypeVar("K_co", bound="Keeper", covariant=True)


@dataclass(frozen=True)
class WantedSample:
    """Request for a sample by its key: its keeper has the prompt."""

    group_id: int
    index: int
    """Index within its group, from 0."""
    begun: int = 0
    """Number of response tokens that its first call had sampled when it was aborted."""
    cut_at: int | None = None
    """Maximum response tokens of its first call; see `SampleRequest`."""

    @property
    def key(self) -> SampleKey:
        """Identity of the sample in its run."""
        return self.group_id, self.index


@dataclass(frozen=True)
class SampleEnd:
    """How a sample ended, without its tokens."""

    group_id: int
    index: int
    finish_reason: FinishReason
    """See `GeneratedSample`."""
    tokens: int
    """Number of its response tokens."""
    error: str | None = None
    """Why it failed; None where it did not."""
    kept: bool = False
    """Whether its keeper has it. Otherwise it was not generated."""

    @property
    def key(self) -> SampleKey:
        """Identity of the sample in its run."""
        return self.group_id, self.index

    @classmethod
    def of(cls, sample: GeneratedSample) -> Self:
        """Return the end of a sample that was kept."""
        return cls(*sample.key, sample.finish_reason, sample.tokens, sample.error, kept=True)

    @classmethod
    def failed(cls, wanted: WantedSample, error: str) -> Self:
        """Return the end of a sample that failed and was not generated."""
        return cls(*wanted.key, FinishReason.ERROR, 0, error)

    @classmethod
    def aborted(cls, wanted: WantedSample) -> Self:
        """Return the end of a sample that was aborted before it was generated."""
        return cls(*wanted.key, FinishReason.ABORT, wanted.begun)


class Keeper(Protocol):
    """Keeper of samples, as the engine's process knows it."""

    def requests(self, wanted: Sequence[WantedSample]) -> list[SampleRequest]:
        """Return the requests for samples."""

    def take(self, samples: Sequence[GeneratedSample]) -> list[SampleEnd]:
        """Keep samples that ended. Return their ends."""

    def close(self) -> None:
        """Finish writing, and release what it holds."""


class KeeperRefused(Exception):
    """A keeper cannot work in the engine's process: its user must have it elsewhere."""


class Kept(Protocol[K_co]):
    """A keeper as its user knows it. A context manager: it closes the keeper."""

    def call(self, method: Callable[Concatenate[K_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return the result of a method of the keeper. Raises what the method raises, and EngineError where the keeper
        is lost."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None: ...


class KeptHere(Generic[K]):
    """A keeper in its user's own process."""

    def __init__(self, keeper: K) -> None:
        self.keeper = keeper

    def call(self, method: Callable[Concatenate[K, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """See `Kept`."""
        return method(self.keeper, *args, **kwargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        close_after(error, self.keeper.close)


def close_after(error: BaseException | None, close: Callable[[], None]) -> None:
    """Close something at the end of a block. If the block raised an error, a second one becomes a note on it."""
    if error is None:
        close()
        return
    try:
        close()
    except Exception as second:  # the caller must see the error that ended the work
        error.add_note(f"{type(second).__name__} meanwhile: {second}")
