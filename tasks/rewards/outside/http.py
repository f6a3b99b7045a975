"""A service that is asked by HTTP: one POST a question, JSON both ways.

What a service replies besides an answer is not repeated in messages: it may quote what it was sent, keys too.
"""

import asyncio
import os
from typing import Any

import httpx

from cairn.storage.canonical import from_json
from cairn.tasks.rewards import TryAgain
from cairn.tasks.rewards.process import GraderFailed

_BUSY = (408, 425, 429)
_ANYBODYS = (401, 402, 403, 404, 405, 407)
"""Statuses that say nothing of the question."""


class Service:
    """At one address. Its client belongs to the event loop that first asks."""

    def __init__(self, url: str, key_env: str | None, timeout: float, at_once: int) -> None:
        """`key_env`: environment variable with the key that it wants as a bearer. `timeout`: seconds for an answer."""
        self._url = url
        self._key_env = key_env
        self._timeout = timeout
        self._at_once = at_once
        self._client: httpx.AsyncClient | None = None

    async def post(self, question: Any) -> Any:
        """The JSON value that it answers with.

        Raises:
            TryAgain: it does not answer now.
            GraderFailed: it refuses whatever it is asked, or its key is not there.
            ValueError: it refuses this question, or answers with something else than JSON.
        """
        if self._client is None:
            limits = httpx.Limits(max_connections=self._at_once, max_keepalive_connections=self._at_once)
            self._client = httpx.AsyncClient(timeout=self._timeout, limits=limits)
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._client.post(self._url, json=question, headers=self._headers())
        except (TimeoutError, httpx.TimeoutException):
            raise TryAgain(f"{self._url} did not answer within {self._timeout:g} s") from None
        except httpx.TransportError as error:
            raise TryAgain(f"{self._url} does not answer ({type(error).__name__})") from None
        status = reply.status_code
        if status in _BUSY or status >= 500:
            raise TryAgain(f"{self._url} answers with HTTP status {status}")
        if status in _ANYBODYS or 300 <= status < 400:
            key = f"the key in the environment variable {self._key_env}" if self._key_env else "whether it wants a key"
            raise GraderFailed(f"{self._url} answers with HTTP status {status}: check the address, and {key}")
        if status >= 400:
            raise ValueError(f"{self._url} refuses this sample with HTTP status {status}")
        try:
            return from_json(reply.content)
        except ValueError:
            raise ValueError(f"{self._url} answers with something else than JSON, or nested too deeply") from None

    async def close(self) -> None:
        """Let go of its connections."""
        if self._client is not None:
            await self._client.aclose()

    def _headers(self) -> dict[str, str]:
        if self._key_env is None:
            return {}
        key = os.environ.get(self._key_env, "").strip()
        if not key:
            raise GraderFailed(f"the environment variable {self._key_env} is empty: put the key for {self._url} there")
        return {"Authorization": f"Bearer {key}"}
