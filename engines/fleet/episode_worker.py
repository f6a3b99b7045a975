"""The contents of an episode worker: the process of user code, as next to an engine, and the connection to the
engine."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from cairn.engines.agents.episodes.samples import SampleEngine
from cairn.engines.agents.episodes.user_code import GenerateFunction
from cairn.engines.fleet.remote_stream import RemoteEngine, RemoteStream
from cairn.engines.types.errors import EngineError
from cairn.engines.types.trajectories import GeneratedSample, Recorded, SampleKey, SampleRequest
from cairn.engines.types.types import SamplingParams


class EpisodeWorker:
    """Runner of episodes, for one call after the other. Calls are distinguished by the name of their client."""

    def __init__(self) -> None:
        self._samples = SampleEngine(self._open, self._abort)
        self._engine: RemoteEngine | None = None
        """The rollout engine of the running call."""
        self._aborted: str | None = None
        self._cancelled: set[str] = set()
        self._open_episodes: set[SampleKey] = set()
        self._ended = 0

    def generate_samples(
        self, engine: RemoteEngine, samples: Sequence[SampleRequest], params: SamplingParams, function: GenerateFunction
    ) -> Iterator[list[GeneratedSample] | Recorded]:
        """Generate samples; see `cairn.engines.agents.episodes.samples.SampleEngine.generate`. `engine` serves their
        requests."""
        if engine.client in self._cancelled:
            return
        if engine.client == self._aborted:
            yield [GeneratedSample.aborted(sample) for sample in samples]
            return
        self._engine = engine
        self._open_episodes = {sample.key for sample in samples}
        try:
            for result in self._samples.generate(samples, params, function):
                if isinstance(result, list):
                    self._open_episodes.difference_update(sample.key for sample in result)
                    self._ended += len(result)
                yield result
        finally:
            self._engine = None
            self._open_episodes = set()

    def acknowledge(self, client: str, number: int) -> None:
        """Confirm that what a call yielded with this number, and all before it, is durable. Does nothing where the call
        has ended."""
        if self._is_running(client):
            self._samples.acknowledge(number)

    def abort(self, client: str) -> None:
        """End a call soon, begun or not: it yields each unfinished sample with what it has so far."""
        self._aborted = client
        if self._is_running(client):
            self._samples.abort()

    def give_up(self, client: str) -> None:
        """Cancel a call, begun or not, whose samples are not needed. The process of its code ends too."""
        self._cancelled.add(client)
        if self._is_running(client):
            self._samples.give_up()

    def give_up_all(self) -> None:
        """Cancel the running call, whichever client it belongs to."""
        if (engine := self._engine) is not None:
            self.give_up(engine.client)

    def health(self) -> dict[str, Any]:
        """Return counters. Keys: open_episodes (not ended yet), ended_episodes (since the worker was made)."""
        return {"open_episodes": len(self._open_episodes), "ended_episodes": self._ended}

    def _is_running(self, client: str) -> bool:
        engine = self._engine
        return engine is not None and engine.client == client

    def _open(self) -> RemoteStream:
        assert self._engine is not None
        stream = self._engine.open()
        if self._aborted == self._engine.client:
            stream.abort()
        return stream

    def _abort(self) -> None:
        if (engine := self._engine) is not None:
            with suppress(EngineError):  # its samples raise the same error
                engine.abort()
