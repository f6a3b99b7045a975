"""Requests to the policy and to services."""

from typing import Any

from cairn.engines.agents.slime import post as post


async def get(url: str) -> Any:
    """Return the response to a GET request, read from JSON."""
    from aiohttp import ClientSession

    async with ClientSession(raise_for_status=True) as client, client.get(url) as response:
        return await response.json(content_type=None)
