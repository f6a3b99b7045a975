"""How busy a server was while it generated."""

import asyncio
from contextlib import suppress

import aiohttp

_INTERVAL = 0.25
_TIMEOUT = aiohttp.ClientTimeout(total=5)


class Loads:
    """The most requests that a server ran, and had waiting, at any of the moments it was asked."""

    def __init__(self, server: str) -> None:
        self._server = server
        self.running = 0
        self.queued = 0

    async def watch(self, http: aiohttp.ClientSession) -> None:
        """Ask again and again, until cancelled. A server that does not answer is not this one's to judge."""
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with http.get(f"{self._server}/v1/loads", timeout=_TIMEOUT) as reply:
                    ranks = (await reply.json())["loads"] if reply.status == 200 else []
                self.running = max(self.running, sum(rank["num_running_reqs"] for rank in ranks))
                self.queued = max(self.queued, sum(rank["num_waiting_reqs"] for rank in ranks))
            await asyncio.sleep(_INTERVAL)
