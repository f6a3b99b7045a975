"""An MCP server made with the SDK, which can do what servers do: `python mcp_server.py stdio`, or `http PORT`."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

server = MCPServer("numbers")
total = 0


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@server.tool()
def count(by: int = 1) -> int:
    """Counts up."""
    global total
    total += by
    return total


@server.tool()
def fail() -> str:
    raise ValueError("there is no such page")


@server.tool()
def flood() -> str:
    return "x" * 3_000_000


@server.tool()
def end() -> str:
    sys.stderr.write("out of luck\n")
    sys.stderr.flush()
    os._exit(3)


@server.tool()
async def hang() -> str:
    await asyncio.sleep(1000)
    return ""


if __name__ == "__main__":
    if sys.argv[1] == "http":
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run("stdio")
