"""Keepers of samples: objects in the process of an engine that have it generate samples, and take them. So their users,
in other processes, handle the ends of samples and no tokens."""

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import FinishReason, SamplingParams


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


class SampleSource(Protocol):
    """The engine, as a keeper in its process knows it."""

    def generate(
        self, samples: Sequence[SampleRequest], params: SamplingParams, function: Any
    ) -> Generator[list[GeneratedSample] | Recorded, None, None]:
        """Generate samples: see `cairn.engines.agents.episodes.samples.SampleEngine`."""

    def abort(self) -> None:
        """End the running `generate` soon. Called from the thread that reads it."""


class Keeper(Protocol):
    """Keeper of samples, as the engine's process knows it. One thread at a time calls it."""

    def generate(self, engine: SampleSource) -> Iterator[Any]:
        """Have the engine generate samples, and keep them. Yield messages to the keeper's user, the first one before
        anything is generated."""

    def finish(self) -> Any:
        """Return what the user gets of the samples in the end. The engine may generate others meanwhile."""

    def close(self) -> None:
        """Finish writing, and release what it holds. Called in any case, and last."""


K = TypeVar("K", bound=Keeper)


class KeeperRefused(Exception):
    """A keeper cannot work in the engine's process: its user must have it elsewhere."""


@dataclass(frozen=True)
class Finished:
    """Last message of a keeper."""

    result: Any
    """What its `finish` returned."""
    usage: Mapping[str, int]
    """Usage counters of the engine, after it has generated; see cairn.engines.rollout.base."""


@contextmanager
def closed_in_the_end(keeper: K) -> Iterator[K]:
    """Close a keeper after the block. If the block raised an error, a second one becomes a note on it."""
    try:
        yield keeper
    except BaseException as error:
        try:
            keeper.close()
        except Exception as second:  # the caller must see the error that ended the work
            error.add_note(f"{type(second).__name__} meanwhile: {second}")
        raise
    keeper.close()
