"""Tools of an MCP server, through the official SDK: `pip install 'cairn-rl[agents]'`.

    async with cairn.mcp(command=["python", "server.py"]) as tools:
        found = await ctx.call(tools["search"], {"query": "..."})

Each is a `cairn.Tool` with the server's name, description and schema, and behaves like every tool: calls are recorded,
late calls fail, results are bounded.

| the server | result of the call |
|---|---|
| responds | its text; content that is not text is named and left out |
| reports that the call failed | `ToolFailed`, with the server's message |
| is late | `ToolFailed`: the call is cancelled, and the server stays in use |
| exits, or exceeds the maximum message size | `ToolLost`; `ToolUnavailable` for later calls: the sample fails |
| does not start | `ToolUnavailable`, when the context is entered |
"""

import asyncio
import contextvars
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
from mcp.client.streamable_http import streamable_http_client

from cairn.engines.agents.tools.errors import ToolFailed, ToolLost, ToolUnavailable
from cairn.engines.agents.tools.tool import MAX_OUTPUT, TIMEOUT, Kind, Tool

# Remote servers: the SDK's streamable HTTP transport, with a bound on the size of responses.


CONNECT = 30.0
"""Seconds to connect, and to send a request."""


class TooLong(Exception):
    """A response exceeds the maximum size of a message."""


@asynccontextmanager
async def bounded_streams(url: str, headers: Mapping[str, str], max_message: int) -> AsyncIterator[tuple[Any, Any]]:
    """Open `streamable_http_client` with responses of at most `max_message` bytes.

    Reading has no timeout of its own: each call has one.
    """
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
        if request.method == "POST":  # other messages come in a stream that stays open
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


# Local servers: a transport of the SDK over standard input and output of a child process.
#
# | the server | result |
# |---|---|
# | sends a message over the maximum size | it is killed; `ended` reports it |
# | exits | `ended` reports how, with the last line of its standard error |
# | still runs when its input is closed | SIGTERM, then SIGKILL |
# | has a parent that is killed | it is killed too, as part of the same process group |


_TO_END_PROCESS = 2.0
"""Seconds that a server has to exit after its input was closed, and again after SIGTERM."""
_STDERR = 4096
"""Bytes of standard error that are stored."""
_LAST_LINE = 200


class ServerProcess:
    """The process of one server, as a context manager."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None, folder: str | None, max_message: int
    ) -> None:
        """Store the settings of the process.

        Args:
            command: program and arguments.
            env: variables in addition to those that the SDK passes on, such as PATH and HOME.
            folder: working directory.
            max_message: maximum size of a message in bytes.
        """
        self._command = command
        self._env = env
        self._folder = folder
        self._max_message = max_message
        self._process: asyncio.subprocess.Process | None = None
        self._too_long = False
        self._stderr = b""

    async def __aenter__(self) -> Any:
        import anyio
        from mcp.client.stdio import get_default_environment

        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=get_default_environment() | dict(self._env or {}),
            cwd=self._folder,
            limit=self._max_message,
        )
        incoming, read = anyio.create_memory_object_stream[Any](0)
        write, outgoing = anyio.create_memory_object_stream[Any](0)
        self._streams = (incoming, read, write, outgoing)
        self._receiving = asyncio.create_task(self._receive(process, incoming))
        self._sending = asyncio.create_task(self._send(process, outgoing))
        self._reading_stderr = asyncio.create_task(self._read_stderr(process))
        return read, write

    async def __aexit__(self, *_: Any) -> None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        for stream in self._streams:
            stream.close()
        process.stdin.close()
        try:
            for end in (process.terminate, process.kill):
                with suppress(TimeoutError):
                    async with asyncio.timeout(_TO_END_PROCESS):
                        await process.wait()
                if process.returncode is not None:
                    break
                end()
            await process.wait()
        finally:
            if process.returncode is None:  # the wait was cancelled
                with suppress(ProcessLookupError):
                    process.kill()
            for task in (self._receiving, self._sending, self._reading_stderr):
                task.cancel()

    @property
    def is_over(self) -> bool:
        """Whether no more messages will arrive from the server."""
        return self._receiving.done()

    async def ended(self) -> str | None:
        """Return how the process has ended; None where it still runs."""
        if self._process is None:
            return None
        if self._too_long:
            return f"it sent a message of more than {self._max_message:,} bytes"
        with suppress(TimeoutError):  # its output ends a little before it does
            async with asyncio.timeout(0.5):
                await self._process.wait()
        if self._process.returncode is None:
            return None
        with suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.shield(self._reading_stderr)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        last_line = f" ({lines[-1][:_LAST_LINE]})" if lines else ""
        return f"its process ended with exit code {self._process.returncode}{last_line}"

    async def _receive(self, process: asyncio.subprocess.Process, incoming: Any) -> None:
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        assert process.stdout is not None
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with incoming:
                while True:
                    try:
                        line = await process.stdout.readline()
                    except ValueError:
                        self._too_long = True
                        process.kill()
                        return
                    if not line:
                        return
                    try:
                        message: Any = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError as error:  # the SDK skips what is no message
                        message = error
                    await incoming.send(message)

    async def _send(self, process: asyncio.subprocess.Process, outgoing: Any) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            async with outgoing:
                async for message in outgoing:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(f"{text}\n".encode())
                    await process.stdin.drain()

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(65_536):
            self._stderr = (self._stderr + part)[-_STDERR:]


MAX_MESSAGE = 1 << 20
"""Maximum size of a server's message in bytes."""
START = 30.0
"""Seconds that a server has to start and list its tools."""
_TO_END = 1.0
"""Seconds to wait for the reason of a broken connection."""
_MOST_TOOLS = 1000


@dataclass(frozen=True)
class _Settings:
    """Settings of a server; equal settings share a server."""

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
    def description(self) -> str:
        return f"the MCP server {self.url or ' '.join(self.command)}"


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Settings, _Server]]" = WeakKeyDictionary()


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
    """Connect to an MCP server; yield its tools by name. Raises ToolUnavailable where it is unreachable or does not
    start.

    Args:
        command: starts a server that uses its standard input and output.
        url: address of a server that uses streamable HTTP, in place of `command`.
        kind: kind of all its tools, see `cairn.tool`. `deterministic`: the server starts anew with every episode, and
            responds identically to the same calls.
        trust_hints: make tools `pure` that the server marks read-only or idempotent. The protocol forbids to rely on
            these hints of an untrusted server.
        shared: one server for all episodes on the event loop of this process; otherwise each episode starts its own.
        prefix: prefix of the tools' names, where two servers use the same names.
        timeout: maximum seconds of a call.
        max_output: maximum characters of a result.
        max_message: maximum bytes of a message.
        env: variables of the server's process, in addition to PATH, HOME and the like.
        headers: headers of HTTP requests.
        folder: working directory of the process.
    """
    if bool(command) == bool(url):
        raise ValueError("cairn.mcp: pass either the command that starts the server or its url")
    if shared and kind == "deterministic":
        raise ValueError(
            "cairn.mcp: one episode cannot rebuild the state of a shared server: leave out shared or set another kind"
        )
    settings = _Settings(
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
        if settings not in servers or servers[settings].is_over:
            servers[settings] = _Server(settings)
        yield await servers[settings].tools()
        return
    server = _Server(settings)
    try:
        yield await server.tools()
    finally:
        await server.end()


class _Server:
    """A connection in a task of its own, so that tasks of the SDK do not belong to the episode."""

    def __init__(self, settings: _Settings) -> None:
        self._settings = settings
        self._process: ServerProcess | None = None
        self._over = asyncio.Event()
        self._why = "it was closed"
        """Why the server is unavailable, where it is."""
        loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[Mapping[str, Tool]] = loop.create_future()
        self._task = asyncio.Task(self._run(), loop=loop, context=contextvars.Context())

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def tools(self) -> Mapping[str, Tool]:
        """Return the tools by name, as soon as the server has listed them."""
        return await asyncio.shield(self._begun)

    async def end(self) -> None:
        self._over.set()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
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
        # Waiting episodes need every error, of whatever type. Later errors reach them through their calls.
        except BaseException as error:
            late = f"it did not start within {START:g} s" if isinstance(error, TimeoutError) else None
            ended = None if late else await self._ended()
            self._why = late or ended or _first_message(error)
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            self._fail(ToolUnavailable(f"{self._settings.description}: {self._why}"))

    def _fail(self, error: ToolUnavailable) -> None:
        if not self._begun.done():
            self._begun.set_exception(error)
            self._begun.exception()  # marks it as retrieved: perhaps no episode waits for it

    def _transport(self) -> Any:
        settings = self._settings
        if settings.url is None:
            self._process = ServerProcess(settings.command, dict(settings.env), settings.folder, settings.max_message)
            return self._process
        return bounded_streams(settings.url, dict(settings.headers), settings.max_message)

    async def _offered(self) -> Mapping[str, Tool]:
        tools: dict[str, Tool] = {}
        cursor = None
        while True:
            page = await self._client.list_tools(cursor=cursor)
            for one in page.tools:
                tool = self._tool(one)
                if tool.name in tools:
                    raise ValueError(f"it has two tools named {tool.name}")
                tools[tool.name] = tool
            cursor = page.next_cursor
            if cursor is None:
                return tools
            if len(tools) > _MOST_TOOLS:
                raise ValueError(f"it has more than {_MOST_TOOLS:,} tools")

    def _tool(self, offered: Any) -> Tool:
        settings, hints = self._settings, offered.annotations
        harmless = hints is not None and bool(hints.read_only_hint or hints.idempotent_hint)
        kind: Kind = "pure" if settings.trust_hints and harmless else settings.kind
        name = re.sub(r"[^A-Za-z0-9_-]", "_", settings.prefix + offered.name)[:64]

        async def call(**arguments: Any) -> str:
            return await self._call(name, offered.name, kind, arguments)

        return Tool(
            call,
            kind=kind,
            timeout=settings.timeout,
            max_output=settings.max_output,
            name=name,
            description=offered.description or "",
            parameters=offered.input_schema,
        )

    async def _call(self, name: str, offered: str, kind: Kind, arguments: dict[str, Any]) -> str:
        from mcp.shared.exceptions import MCPError

        if self._task.done() or self._over.is_set():
            raise ToolUnavailable(f"{name}: {self._settings.description}: {self._why}")
        if self._process is not None and self._process.is_over:
            raise ToolUnavailable(f"{name}: {self._settings.description}: {await self._ended()}")
        try:
            result = await self._client.call_tool(offered, arguments)
        # The exception type depends on where the connection broke.
        except Exception as error:
            ended = await self._ended()
            if ended is None and isinstance(error, MCPError) and not _is_closed(error):
                raise ToolFailed(f"{name}: {error}") from None
            if ended is None:
                await asyncio.wait({self._task}, timeout=_TO_END)
            why = ended or (self._why if self._task.done() else _first_message(error))
            lost = ToolUnavailable if kind == "pure" else ToolLost
            raise lost(f"{name}: {self._settings.description}: {why}") from None
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


def _first_message(error: BaseException) -> str:
    """Return the message of the first error in a group: the SDK's tasks raise groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
