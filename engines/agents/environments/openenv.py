"""An environment behind OpenEnv's WebSocket.

Cairn has its own client: OpenEnv's takes seconds to import, and cannot be installed together with Cairn.

    async with cairn.openenv("http://host:8000") as env:
        begun = await ctx.call(env.reset, {"seed": 7})
        result = await ctx.call(env.step, {"action": {"n": 3}})     # {"observation": ..., "reward": ..., "done": ...}

A connection is a session of the server, with an environment of its own. Its calls are tools, recorded like all others.
`deterministic`: after a crash a new session is reset and stepped as recorded, and its responses are compared with the
record. For an environment whose responses vary use `kind="effects"`: an interrupted episode then fails with a named
error, since its session is lost.

| the server | result of the call |
|---|---|
| reports that an action is wrong, or raises an error | `ToolFailed`, with its message |
| is late | `ToolFailed`, and the session ends: its next response would belong to another call |
| has reached its maximum of sessions | `reset` retries for `patience` seconds |
| is unreachable, exits, or sends an invalid or too large response | `ToolUnavailable` or `ToolLost`: the sample fails |
"""

import asyncio
import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from cairn.engines.agents.tools.errors import Reason, ToolFailed, ToolLost, ToolUnavailable
from cairn.engines.agents.tools.tool import MAX_OUTPUT, TIMEOUT, Kind, Tool
from cairn.storage.store.canonical import from_json

if TYPE_CHECKING:
    import aiohttp

MAX_MESSAGE = 1 << 20
"""Maximum size of a server's message in bytes."""
PATIENCE = 120.0
"""Seconds to wait for a free session."""
_CONNECT = 10.0
_BETWEEN_TRIES = 0.5
_FULL = "CAPACITY_REACHED"
_CALL_ERRORS = ("EXECUTION_ERROR", "VALIDATION_ERROR", "INVALID_JSON", "UNKNOWN_TYPE")
"""Error codes after which the session stays open."""
_LONGEST_ERROR = 500


class _Full(Exception):
    """The server has reached its maximum of sessions."""


class OpenEnv:
    """A session, as a context manager. The first reset connects to the server."""

    def __init__(
        self,
        url: str,
        *,
        kind: Kind = "deterministic",
        timeout: float = TIMEOUT,
        patience: float = PATIENCE,
        max_output: int = MAX_OUTPUT,
        max_message: int = MAX_MESSAGE,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Store the settings of the session.

        Args:
            url: URL of the server: `http://…`, `https://…` or `ws://…`, without the `/ws` at its end.
            kind: `deterministic`: after a reset with the same seed and the same steps, its responses are the same.
                Otherwise `effects`.
            timeout: maximum seconds of a call.
            patience: seconds that `reset` waits for a session in addition to `timeout`.
            max_output: maximum characters of a result.
            max_message: maximum bytes of a message.
            headers: headers of the request that opens the connection, such as an authorization.
        """
        if kind == "pure":
            raise ValueError("cairn.openenv: an environment has state: set kind to deterministic or effects")
        self.url = url.rstrip("/")
        self.kind: Kind = kind
        self._timeout = timeout
        self._patience = patience
        self._max_output = max_output
        self._max_message = max_message
        self._headers = dict(headers or {})
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._over: str | None = None
        self._turn = asyncio.Lock()

    async def __aenter__(self) -> "OpenEnv":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._socket is not None and self._over is None:
            self._over = "it was closed"
            try:
                async with asyncio.timeout(1):
                    await self._socket.send_str('{"type": "close"}')
            except (TimeoutError, OSError):
                pass
        await self._disconnect()

    @cached_property
    def reset(self) -> Tool:
        """The tool that begins an episode. Arguments: those of the environment, such as `seed`.

        Returns `{"observation", "reward", "done"}`.
        """

        async def reset(**options: Any) -> Any:
            """Begin anew."""
            await self._connected()
            return await self._request("reset", options)

        return self._tool(reset, self._timeout + self._patience)

    @cached_property
    def step(self) -> Tool:
        """The tool that acts. `action`: an object in the environment's format. Returns the same as `reset`."""

        async def step(action: dict[str, Any]) -> Any:
            """Act in the environment."""
            return await self._request("step", action)

        return self._tool(step, self._timeout)

    @cached_property
    def state(self) -> Tool:
        """The tool that returns the server's state of the session, such as the number of steps."""

        async def state() -> Any:
            """Look at the state of the environment."""
            return await self._request("state", {})

        return self._tool(state, self._timeout)

    @property
    def tools(self) -> dict[str, Tool]:
        """All three tools, by name."""
        return {tool.name: tool for tool in (self.reset, self.step, self.state)}

    def _tool(self, function: Any, timeout: float) -> Tool:
        return Tool(function, kind=self.kind, timeout=timeout, max_output=self._max_output)

    async def _connected(self) -> None:
        """Open a session. A full server accepts the connection, reports that it is full and closes it."""
        import aiohttp

        if self._socket is not None:
            return
        self._check()
        deadline = asyncio.get_running_loop().time() + self._patience
        self._client = aiohttp.ClientSession(headers=self._headers)
        while True:
            try:
                async with asyncio.timeout(_CONNECT):
                    self._socket = await self._client.ws_connect(
                        f"{self.url}/ws", max_msg_size=self._max_message, autoping=True
                    )
                await self._exchange("state", {})
                return
            except _Full as full:
                self._socket = None
                if asyncio.get_running_loop().time() + _BETWEEN_TRIES > deadline:
                    why = f"it had no free session within {self._patience:g} s: {full}"
                    raise await self._end(ToolUnavailable, why) from None
                await asyncio.sleep(_BETWEEN_TRIES)
            except TimeoutError:
                raise await self._end(ToolUnavailable, f"it cannot be reached within {_CONNECT:g} s") from None
            except (aiohttp.ClientError, OSError) as error:
                raise await self._end(ToolUnavailable, f"it cannot be reached: {error}") from None

    def _check(self) -> None:
        if self._over is not None:
            raise ToolUnavailable(f"the environment at {self.url}: its session is over: {self._over}")

    async def _request(self, kind: str, data: Mapping[str, Any]) -> Any:
        self._check()
        if self._socket is None:
            raise ToolUnavailable(
                f"the environment at {self.url}: {kind} came before a reset in this session; if the episode was "
                "interrupted after a reset, its session is lost"
            )
        try:
            return await self._exchange(kind, data)
        except _Full as full:
            raise await self._end(ToolUnavailable, str(full)) from None

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Send one message and receive its response; concurrent calls of an episode run one after the other."""
        assert self._socket is not None
        message = {"type": kind} if kind == "state" else {"type": kind, "data": data}
        async with self._turn:
            try:
                await self._socket.send_str(json.dumps(message))
                answer = await self._socket.receive()
            except (OSError, ConnectionError) as error:
                raise await self._end(ToolLost, f"the connection broke: {error}") from None
            except asyncio.CancelledError:
                self._over = f"a {kind} was not answered in time"
                raise
        return await self._answer(answer)

    async def _answer(self, answer: Any) -> Any:
        import aiohttp

        if answer.type != aiohttp.WSMsgType.TEXT:
            raise await self._end(ToolLost, self._closed(answer))
        try:
            message = from_json(answer.data)
            kind, data = message["type"], message["data"]
        except (ValueError, TypeError, KeyError):
            raise await self._end(ToolLost, f"it sent an invalid response: {answer.data[:80]!r}") from None
        if kind != "error":
            return data
        code, text = data.get("code"), str(data.get("message", data))[:_LONGEST_ERROR]
        if code == _FULL:
            raise _Full(text)
        if code not in _CALL_ERRORS:
            raise await self._end(ToolUnavailable, f"{text} ({code})")
        reason = Reason.ARGUMENTS if code == "VALIDATION_ERROR" else Reason.RAISED
        details = data.get("errors")
        raise ToolFailed(text if not details else f"{text}: {json.dumps(details)[:_LONGEST_ERROR]}", reason)

    def _closed(self, answer: Any) -> str:
        import aiohttp

        assert self._socket is not None
        if self._socket.close_code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            return f"it sent a message of more than {self._max_message:,} bytes"
        if answer.type == aiohttp.WSMsgType.BINARY:
            return f"it sent {len(answer.data):,} bytes instead of text"
        return f"it closed the connection (code {self._socket.close_code})"

    async def _end(self, error: type[ToolUnavailable], why: str) -> ToolUnavailable:
        self._over = why
        await self._disconnect()
        return error(f"the environment at {self.url}: {why}")

    async def _disconnect(self) -> None:
        client, self._client, self._socket = self._client, None, None
        if client is not None:
            await client.close()
