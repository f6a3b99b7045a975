"""Tools of an MCP server, through the official SDK: `pip install 'cairn-rl[agents]'`.

    async with cairn.mcp(command=["python", "server.py"]) as tools:
        found = await ctx.call(tools["search"], {"query": "..."})

Each is a `cairn.Tool`, with the name, description and schema that the server gives it, so what holds of tools holds of
them: they are recorded, late calls are given up, results are bounded.

| the server | becomes of the call |
|---|---|
| answers | its text; what is no text is named and left out |
| says that the call failed | `ToolFailed`, with what it says |
| is late | `ToolFailed`: the call is withdrawn, and the server goes on |
| ends, or sends more than it may | `ToolLost`, or `ToolUnavailable` for the calls after that: the sample fails |
| does not start | `ToolUnavailable`, when the context begins |
"""

import asyncio
import contextvars
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from cairn.engines.environments.mcp_process import ServerProcess
from cairn.engines.tools.errors import ToolFailed, ToolLost, ToolUnavailable
from cairn.engines.tools.tool import MAX_OUTPUT, TIMEOUT, Kind, Tool

MAX_MESSAGE = 1 << 20
"""Bytes of a message of a server."""
START = 30.0
"""Seconds in which it has to start and say what it offers."""
_TO_END = 1.0
"""Seconds in which a connection that broke says why."""
_MOST_TOOLS = 1000


@dataclass(frozen=True)
class _Asked:
    """Of a server, by values that are equal for the same one."""

    command: tuple[str, ...]
    url: str | None
    kind: Kind
    trust_hints: bool
    prefix: str
    timeout: float
    max_output: int
    max_message: int
    env: tuple[tuple[str, str], ...]
    headers: tuple[tuple[str, str], ...]
    folder: str | None

    @property
    def told(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Asked, _Server]]" = WeakKeyDictionary()


@asynccontextmanager
async def mcp(
    *,
    command: Sequence[str] = (),
    url: str | None = None,
    kind: Kind = "effects",
    trust_hints: bool = False,
    shared: bool = False,
    prefix: str = "",
    timeout: float = TIMEOUT,
    max_output: int = MAX_OUTPUT,
    max_message: int = MAX_MESSAGE,
    env: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    folder: str | None = None,
) -> AsyncIterator[Mapping[str, Tool]]:
    """The tools of a server by name. Raises ToolUnavailable where it cannot be reached or does not start.

    Args:
        command: starts a server that speaks over its standard input and output.
        url: in its place, of one that speaks streamable HTTP.
        kind: of all its tools, see `cairn.tool`. `deterministic`: the server begins anew with every episode, and
            answers the same to the same calls.
        trust_hints: let tools that the server calls read-only or idempotent be `pure`. The protocol says not to
            believe a server that one does not trust.
        shared: one server for all episodes of this process, until its work ends; otherwise each starts its own.
        prefix: before the names of its tools, where two servers have the same.
        timeout: seconds that a call may take.
        max_output: characters that a call may return.
        max_message: bytes of a message.
        env: variables of the server's process, beside PATH, HOME and the like.
        headers: of requests by HTTP.
        folder: that its process works in.
    """
    if bool(command) == bool(url):
        raise ValueError("cairn.mcp: say either the command that starts the server, or its url")
    if shared and kind == "deterministic":
        raise ValueError("cairn.mcp: a server that episodes share has no state that one of them could build up again")
    asked = _Asked(
        tuple(command),
        url,
        kind,
        trust_hints,
        prefix,
        timeout,
        max_output,
        max_message,
        tuple(sorted((env or {}).items())),
        tuple(sorted((headers or {}).items())),
        folder,
    )
    if shared:
        servers = _shared.setdefault(asyncio.get_running_loop(), {})
        if asked not in servers or servers[asked].is_over:
            servers[asked] = _Server(asked)
        yield await servers[asked].tools()
        return
    server = _Server(asked)
    try:
        yield await server.tools()
    finally:
        await server.end()


class _Server:
    """A connection, held by a task of its own: what the SDK starts is none of the episode's tasks."""

    def __init__(self, asked: _Asked) -> None:
        self._asked = asked
        self._process: ServerProcess | None = None
        self._over = asyncio.Event()
        self._why = "it was left"
        """Why it is no longer there, where it is not."""
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[Mapping[str, Tool]] = loop.create_future()
        self._task = asyncio.Task(self._keep(), loop=loop, context=contextvars.Context())

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def tools(self) -> Mapping[str, Tool]:
        """By name, as soon as it has said what it offers."""
        return await asyncio.shield(self._begun)

    async def end(self) -> None:
        self._over.set()
        await asyncio.wait({self._task})

    async def _keep(self) -> None:
        try:
            from mcp.client import Client
        except ModuleNotFoundError as error:
            self._fail(ToolUnavailable(f"cairn.mcp needs the module {error.name!r}: pip install 'cairn-rl[agents]'"))
            return
        try:
            async with asyncio.timeout(START) as start, Client(self._transport(), cache=None) as self._client:
                tools = await self._offered()
                start.reschedule(None)
                self._begun.set_result(tools)
                await self._over.wait()
        # Whatever it is, the episodes that wait have to hear of it; what comes after they hear from their calls.
        except BaseException as error:
            late = f"it did not start within {START:g} s" if isinstance(error, TimeoutError) else None
            ended = None if late else await self._ended()
            self._why = late or ended or _told(error)
            self._fail(ToolUnavailable(f"{self._asked.told}: {self._why}"))
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._fail(ToolUnavailable(f"{self._asked.told}: {self._why}"))

    def _fail(self, error: ToolUnavailable) -> None:
        if not self._begun.done():
            self._begun.set_exception(error)
            self._begun.exception()  # nobody may be there to hear of it

    def _transport(self) -> Any:
        asked = self._asked
        if asked.url is None:
            self._process = ServerProcess(asked.command, dict(asked.env), asked.folder, asked.max_message)
            return self._process
        from cairn.engines.environments.mcp_http import bounded_streams

        return bounded_streams(asked.url, dict(asked.headers), asked.max_message)

    async def _offered(self) -> Mapping[str, Tool]:
        found: dict[str, Tool] = {}
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for one in page.tools:
                tool = self._tool(one)
                if tool.name in found:
                    raise ValueError(f"it has two tools of the name {tool.name}")
                found[tool.name] = tool
            cursor = page.next_cursor
            if cursor is None:
                return found
            if len(found) > _MOST_TOOLS:
                raise ValueError(f"it has more than {_MOST_TOOLS:,} tools")

    def _tool(self, offered: Any) -> Tool:
        asked, hints = self._asked, offered.annotations
        harmless = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        kind: Kind = "pure" if asked.trust_hints and harmless else asked.kind
        name = re.sub(r"[^A-Za-z0-9_-]", "_", asked.prefix + offered.name)[:64]

        async def call(**arguments: Any) -> str:
            return await self._call(name, offered.name, kind, arguments)

        return Tool(
            call,
            kind=kind,
            timeout=asked.timeout,
            max_output=asked.max_output,
            name=name,
            description=offered.description or "",
            parameters=offered.input_schema,
        )

    async def _call(self, name: str, offered: str, kind: Kind, arguments: dict[str, Any]) -> str:
        from mcp.shared.exceptions import MCPError

        if self._task.done() or self._over.is_set():
            raise ToolUnavailable(f"{name}: {self._asked.told}: {self._why}")
        if self._process is not None and self._process.is_over:
            raise ToolUnavailable(f"{name}: {self._asked.told}: {await self._ended()}")
        try:
            result = await self._client.call_tool(offered, arguments)
        # What a broken connection raises depends on where it broke.
        except Exception as error:
            ended = await self._ended()
            if ended is None and isinstance(error, MCPError) and not _is_closed(error):
                raise ToolFailed(f"{name}: {error}") from None
            if ended is None:
                await asyncio.wait({self._task}, timeout=_TO_END)
            why = ended or (self._why if self._task.done() else _told(error))
            lost = ToolUnavailable if kind == "pure" else ToolLost
            raise lost(f"{name}: {self._asked.told}: {why}") from None
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise ToolFailed(f"{name}: {text}")
        return text

    async def _ended(self) -> str | None:
        return None if self._process is None else await self._process.ended()


def _is_closed(error: Any) -> bool:
    from mcp_types import CONNECTION_CLOSED

    return bool(error.code == CONNECTION_CLOSED)


def _text(content: Any) -> str:
    if content.type == "text":
        text: str = content.text
        return text
    return f"[{content.type}, left out]"


def _told(error: BaseException) -> str:
    """The first of what went wrong: the SDK's tasks end in groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
