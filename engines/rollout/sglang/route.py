"""Where the requests of an engine's client go: to its own server, or through a router to any server of the fleet."""

from collections.abc import Mapping
from dataclasses import dataclass

from cairn.engines.types import RequestId

ROUTING_KEY = "X-SMG-Routing-Key"
"""Header by which the router's policies `consistent_hashing` and `manual` keep requests together."""


@dataclass(frozen=True)
class Route:
    """The way of `/generate`, and every server that it may end at."""

    url: str
    """Takes `/generate`."""
    servers: tuple[str, ...]
    """Take everything else, such as `/abort_request`: the router passes on generation alone."""

    @classmethod
    def to(cls, server: str) -> "Route":
        """Straight to one server."""
        return cls(server, (server,))

    def headers(self, request_id: RequestId) -> Mapping[str, str]:
        """Of a `/generate`: the samples of a group share a prompt, and so a cache."""
        return {ROUTING_KEY: str(request_id[0])}
