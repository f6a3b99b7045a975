"""An MCP server elsewhere: the SDK's transport by streamable HTTP, with a bound on what comes back."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp.client.streamable_http import streamable_http_client

CONNECT = 30.0
"""Seconds to connect, and to send a request."""


class TooLong(Exception):
    """A response has more bytes than a message may."""


@asynccontextmanager
async def bounded_streams(url: str, headers: Mapping[str, str], max_message: int) -> AsyncIterator[tuple[Any, Any]]:
    """As `streamable_http_client`. `max_message`: bytes of a response. How long one may take its call says."""
    client = httpx2.AsyncClient(
        headers={**headers, "accept-encoding": "identity"},  # bytes that are counted are those that arrive
        timeout=httpx2.Timeout(CONNECT, read=None),
        follow_redirects=True,
        transport=_Bounded(max_message),
    )
    async with client, streamable_http_client(url, http_client=client) as streams:
        yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await super().handle_async_request(request)
        if request.method == "POST":  # what is not asked for comes in a stream that stays open
            assert isinstance(response.stream, httpx2.AsyncByteStream)
            response.stream = _Counted(response.stream, self._most)
        return response


class _Counted(httpx2.AsyncByteStream):
    def __init__(self, stream: httpx2.AsyncByteStream, most: int) -> None:
        self._stream = stream
        self._most = most

    async def __aiter__(self) -> AsyncIterator[bytes]:
        count = 0
        async for part in self._stream:
            count += len(part)
            if count > self._most:
                raise TooLong(f"it sent a message of more than {self._most:,} bytes")
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()
