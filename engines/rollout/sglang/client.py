"""The HTTP interface of an SGLang server, as far as Cairn speaks it."""

import base64
from collections.abc import Sequence
from typing import Any

import httpx

from cairn.engines.errors import EngineDied, EngineError, EngineTimeout

POLICY = {"selector": "target"}
"""In a weight update: of the model that is served, and not of layers that draft for it, which nobody trains. By default
a server opens and loads both."""


class Control:
    """Calls to a server other than generation: synchronous, each with a deadline.

    Every call raises EngineTimeout, EngineDied where nobody answers, and EngineError with the server's own words where
    it refuses.
    """

    def __init__(self, url: str, timeout: float) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url, timeout=timeout, trust_env=False)

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def call(self, path: str, body: dict[str, Any] | None = None, timeout: float | None = None) -> dict[str, Any]:
        """POST, or GET where there is no body; returns the JSON of the reply, empty if it has none.

        `timeout`: seconds, for a call that may take longer than others.
        """
        try:
            method = "GET" if body is None else "POST"
            reply = self._http.request(method, path, json=body, timeout=timeout or self._http.timeout)
        except httpx.TimeoutException:
            raise EngineTimeout(f"the SGLang server at {self.url} did not answer {path} in time") from None
        except httpx.TransportError as error:
            lost = str(error) or type(error).__name__  # such as a connection that was reset while the server died
            raise EngineDied(f"the SGLang server at {self.url} is gone or out of reach: {path}: {lost}") from error
        content: Any = reply.json() if reply.headers.get("content-type", "").startswith("application/json") else {}
        if reply.status_code != 200 or (isinstance(content, dict) and content.get("success") is False):
            raise EngineError(f"{path} was refused ({reply.status_code}): {reply.text[:500]}")
        return content if isinstance(content, dict) else {}

    def update_from_tensor(self, handles: Sequence[bytes]) -> None:
        """Replace weights by tensors that each of the server's tensor-parallel ranks maps
        (`cairn.engines.weights.shared`); a weight update must have begun."""
        encoded = [base64.b64encode(handle).decode() for handle in handles]
        body = {"serialized_named_tensors": encoded, "flush_cache": False, **POLICY}
        self.call("/update_weights_from_tensor", body)
