"""A rollout engine as the driver sees it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import ray

from configs.schema.operations import FleetConfig
from configs.schema.rollout import RolloutConfig
from engines.calls import Deadline
from engines.errors import EngineTimeout
from engines.handles import CONTROL, Actor, EngineHandle
from engines.types import Completion, GenerateRequest

LOGS = Path(".cairn/engines")
"""Logs of engines that are servers, below the driver's working directory, on the machine of the engine."""


class RolloutHandle(EngineHandle):
    """A rollout engine. See engines.rollout.base for what its calls do; all may raise EngineDied and EngineTimeout."""

    def __init__(self, name: str, actor: Actor, model_path: str, config: RolloutConfig, fleet: FleetConfig) -> None:
        super().__init__(name, [actor], fleet)
        self._actor = actor
        self._model_path = model_path
        self._config = config
        self._busy = threading.Lock()

    def generate(self, requests: Sequence[GenerateRequest]) -> Iterator[list[Completion]]:
        """Stream completions as they finish, within `rollout.timeout` seconds in all; an engine that is silent is asked
        whether it still lives. Giving the iterator up ends the generation.

        Raises what the engine raises.
        """
        with self.alone():
            deadline = Deadline(self._config.timeout)
            stream = self._actor.call("generate", list(requests), num_returns="streaming")
            try:
                while self._more(stream, deadline):
                    try:
                        ref = next(stream)
                    except StopIteration:
                        return
                    yield self._result(ref, deadline, self._actor, "generate")
            except GeneratorExit:
                self._abort(stream)
                raise

    def weight_version(self) -> int | None:
        """The version it serves; None within an update."""
        ref = self._actor.call("get_weight_version", concurrency_group=CONTROL)
        return self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "get_weight_version")

    def weights_checksum(self) -> str:
        """Checksum of its weights; comparable with the training engine's."""
        return self.finish(self.submit("weights_checksum"), "weights_checksum")

    @property
    def batch_invariant(self) -> bool:
        """Whether its samples do not depend on what else is in their batch, as tried when it started."""
        ref = self._actor.call("batch_invariant", concurrency_group=CONTROL)
        return self._result(ref, Deadline(self._fleet.call_timeout), self._actor, "batch_invariant")

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Have the engine to oneself: to generate, or to update its weights."""
        if not self._busy.acquire(timeout=self._config.timeout):
            raise EngineTimeout(f"{self._actor.name} was busy for {self._config.timeout:g} s")
        try:
            yield
        finally:
            self._busy.release()

    def submit(self, method: str, *args: Any) -> "ray.ObjectRef[Any]":
        """Begin a call that waits its turn behind those before it."""
        return self._actor.call(method, *args)

    def finish(self, ref: "ray.ObjectRef[Any]", method: str) -> Any:
        """Wait for a call that was begun, for `fleet.call_timeout` seconds."""
        return self._result(ref, Deadline(self._fleet.call_timeout), self._actor, method)

    def _adopted(self) -> bool:
        if not super()._adopted():
            return False
        self._actor.call("abort", concurrency_group=CONTROL)  # nobody listens to what its last driver asked for
        return True

    def _make_engine(self, deadline: Deadline) -> None:
        log = Path(LOGS, f"{self._actor.name.replace(':', '-')}.log").absolute()
        ref = self._actor.call("start", self._model_path, self._config, log, deadline.remaining)
        self._result(ref, deadline, self._actor, "start")

    def _more(self, stream: "ray.ObjectRefGenerator", deadline: Deadline) -> Literal[True]:
        """Wait until the stream goes on or ends."""
        while deadline.remaining:
            ready, _ = ray.wait([stream], timeout=min(deadline.remaining, self._fleet.call_timeout))
            if ready:
                return True
            self.health()
        self._suspect = True
        raise EngineTimeout(f"{self._actor.name}.generate() did not end within {deadline.seconds:g} s")

    def _abort(self, stream: "ray.ObjectRefGenerator") -> None:
        """End a generation that nobody listens to, so that the engine is free for the next."""
        self._actor.call("abort", concurrency_group=CONTROL)
        ended, _ = ray.wait([stream.completed()], timeout=self._fleet.call_timeout)
        self._suspect = self._suspect or not ended
