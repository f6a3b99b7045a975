"""An MCP server that is a process of ours: a transport of the SDK, over its standard input and output.

| the server | becomes of it |
|---|---|
| sends a message longer than it may | it is killed: `ended` says so |
| ends | `ended` says how, with the last line that it wrote to its standard error |
| goes on when nobody needs it any more | it is asked to end, then killed |
| belongs to a process that is killed | it is killed too: it is of the same process group |
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

_TO_END = 2.0
"""Seconds that a server has to end after its input did, and again after it was asked to."""
_STDERR = 4096
"""Bytes of its standard error that are kept."""
_LAST_LINE = 200


class ServerProcess:
    """A context, of one server."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None, folder: str | None, max_message: int
    ) -> None:
        """`env`: beside the few variables that the SDK hands on, such as PATH and HOME. `max_message`: bytes."""
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
        heard, read = anyio.create_memory_object_stream[Any](0)
        write, said = anyio.create_memory_object_stream[Any](0)
        self._streams = (heard, read, write, said)
        self._hearing = asyncio.create_task(self._hear(process, heard))
        self._saying = asyncio.create_task(self._say(process, said))
        self._keeping = asyncio.create_task(self._keep_stderr(process))
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
                    async with asyncio.timeout(_TO_END):
                        await process.wait()
                if process.returncode is not None:
                    break
                end()
            await process.wait()
        finally:
            if process.returncode is None:  # it was not waited for to the end
                with suppress(ProcessLookupError):
                    process.kill()
            for task in (self._hearing, self._saying, self._keeping):
                task.cancel()

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come from it."""
        return self._hearing.done()

    async def ended(self) -> str | None:
        """How it has ended; None where it goes on."""
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
                await asyncio.shield(self._keeping)
        lines = self._stderr.decode(errors="replace").strip().splitlines()
        told = f" ({lines[-1][:_LAST_LINE]})" if lines else ""
        return f"its process ended with exit code {self._process.returncode}{told}"

    async def _hear(self, process: asyncio.subprocess.Process, heard: Any) -> None:
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        assert process.stdout is not None
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async with heard:
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
                    except ValueError as error:  # the SDK passes over what is no message
                        message = error
                    await heard.send(message)

    async def _say(self, process: asyncio.subprocess.Process, said: Any) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            async with said:
                async for message in said:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    process.stdin.write(f"{text}\n".encode())
                    await process.stdin.drain()

    async def _keep_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while part := await process.stderr.read(65_536):
            self._stderr = (self._stderr + part)[-_STDERR:]
