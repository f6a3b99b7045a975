"""Prefect's server answers its own pages and programs, and no page of somebody else's.

A browser sends a request for whatever page asks it to, and says on whose behalf. What is refused (403):

| a request | because |
|---|---|
| whose `Host` is neither an address, nor `localhost`, nor a name of this machine | the page's name was pointed here |
| with the `Origin` of another host or port, or none that can be told (`null`) | a page of another origin asks |
| whose `Sec-Fetch-Site` says so, but for a link that is followed | the same |
| with a body that is not declared `application/json` | pages may send such without being allowed to |

Programs send neither of the two headers in the middle. Names of this machine are its host name, the one that the server
was told to listen at, and those in the environment variable `CAIRN_HOSTS`, separated by commas.
"""

import json
import os
import re
import socket
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from ipaddress import ip_address
from typing import Any

HOSTS = "CAIRN_HOSTS"
"""Environment variable with further names of this machine."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class OwnPages:
    """An ASGI application that hands on to another what may be asked."""

    def __init__(self, app: App, *names: str) -> None:
        """`names`: of this machine, beside those that the module names."""
        more = [name.strip() for name in os.environ.get(HOSTS, "").split(",")]
        self._app = app
        self._names = frozenset(name.lower() for name in ("localhost", socket.gethostname(), *names, *more) if name)

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        why = refusal(scope.get("method", "GET"), scope["headers"], self._names) if "headers" in scope else None
        if why is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # that it wants to be opened; closed instead, it is answered with 403
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"detail": why}).encode()})


def refusal(method: str, headers: Collection[tuple[bytes, bytes]], names: Collection[str]) -> str | None:
    """Why a request is refused; None if it is not. `headers` are in lower case, `names` those of this machine."""
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    hosts = found.get("host", [])
    if len(hosts) != 1 or not _is_ours(hosts[0], names):
        return f"{', '.join(hosts) or 'no host'} is no name of this machine: add it to the environment variable {HOSTS}"
    for origin in found.get("origin", []):
        if origin.partition("://")[2].lower() != hosts[0].lower():
            return "a page of another origin may not ask this server"
    if not {*found.get("sec-fetch-site", [])} <= {"same-origin", "none"} and not _follows_a_link(method, found):
        return "a page of another site may not ask this server"
    length = found.get("content-length", ["0"])
    has_body = "transfer-encoding" in found or length != ["0"]
    kinds = [kind.partition(";")[0].strip().lower() for kind in found.get("content-type", [])]
    if has_body and kinds != ["application/json"]:
        return "a body must be declared as application/json"
    return None


def _is_ours(host: str, names: Collection[str]) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].lower()
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return name in names
    return True


def _follows_a_link(method: str, found: dict[str, list[str]]) -> bool:
    return (
        method == "GET" and found.get("sec-fetch-mode") == ["navigate"] and found.get("sec-fetch-dest") == ["document"]
    )


def prefect() -> OwnPages:
    """Prefect's application, for `uvicorn --factory`."""
    from prefect.server.api.server import create_app

    return OwnPages(create_app(final=True))
