"""The router before the rollout servers, as the driver sees it."""

from collections.abc import Mapping, Sequence
from typing import Any

from cairn.configs.schema.operations import FleetConfig
from cairn.configs.schema.rollout import RolloutConfig
from cairn.engines.errors import EngineError
from cairn.engines.fleet.calls import Deadline
from cairn.engines.fleet.handles import Actor, EngineHandle, log_of
from cairn.engines.rollout.factory import kind_of

TO_SAY_WHY = 15.0
"""Seconds beyond its own deadline that an actor gets to end a server that did not start, and to show its log."""


class RouterHandle(EngineHandle):
    """See cairn.engines.rollout.sglang.router for what the calls of one do; all may raise EngineDied and
    EngineTimeout."""

    def __init__(
        self, name: str, actor: Actor, options: Mapping[str, Any], config: RolloutConfig, fleet: FleetConfig
    ) -> None:
        super().__init__(name, [actor], fleet)
        self._actor = actor
        self._options = dict(options)
        self._config = config

    @property
    def url(self) -> str:
        """Where it takes requests; another one after a restart."""
        return self.health()["url"]

    def serve(self, workers: Sequence[Mapping[str, Any]]) -> None:
        """Send requests to exactly these servers."""
        self._call("serve", workers)

    def remove(self, url: str) -> None:
        """Send a server nothing more. A router that does not obey is ended: its requests must not reach that server."""
        try:
            self._call("remove", url)
        except EngineError:
            self.kill()

    def _call(self, method: str, *args: Any) -> None:
        self._result(self._actor.call(method, *args), Deadline(self._fleet.call_timeout), self._actor, method)

    def _make_engine(self, deadline: Deadline) -> None:
        host = self._host(self._actor, deadline)
        maker = kind_of(self._config.engine).router
        arguments = (maker, self._options, self._config, host, log_of(self._actor), deadline.remaining)
        ref = self._actor.call("make", *arguments)
        self._result(ref, Deadline(deadline.remaining + TO_SAY_WHY), self._actor, "make")
