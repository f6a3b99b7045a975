"""An HTTP service in this process: it counts what it is asked, and answers as it is told to."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Replies = Callable[[Any], Any]
"""Body of a request → a JSON value, an HTTP status, or a `web.Response`."""


@dataclass
class Service:
    """What it was asked."""

    url: str = ""
    replies: Replies = lambda body: 0.0
    seconds: float = 0.0
    """That an answer takes."""
    requests: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answered: int = 0
    most: int = 0
    """Requests under way at a time."""
    _now: int = 0

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self._now -= 1
        reply = self.replies(body)
        self.answered += 1
        if isinstance(reply, web.Response):
            return reply
        if isinstance(reply, int) and not isinstance(reply, bool) and reply >= 300:
            return web.Response(status=reply, text=json.dumps(body))
        return web.json_response(reply)


@contextmanager
def serving(replies: Replies = lambda body: 0.0, seconds: float = 0.0) -> Iterator[Service]:
    """A service that answers at any path."""
    service = Service(replies=replies, seconds=seconds)
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        app = web.Application(client_max_size=2**24)
        app.router.add_post("/{tail:.*}", service._handle)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, shutdown_timeout=0.1)
        await site.start()
        service.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield service
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


def chat_completion(text: str | None, **usage: int) -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage}
