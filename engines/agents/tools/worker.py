"""Main loop of a tool process: it makes one call after the other until the connection is closed.

Messages are JSON. The parent first sends `path` of the tool's function; the response is `loaded`, with a reason `why`
where that failed. For a call it sends `name`, `arguments`, `key`, `memory` and `max_output`. The response has `result`,
or `failed` and `reason`, or `unavailable`. It also has `spoilt`, whether the process should be replaced: it has child
processes left, or is out of memory.
"""

import ctypes
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

from cairn.configs.plugins import BadPlugin, load_callable
from cairn.engines.agents.tools.errors import Reason, ToolFailed, ToolUnavailable
from cairn.engines.agents.tools.tool import Tool
from cairn.engines.processes.child import adopt_orphans, die_with


def main(connection_fd: int, parent: int, network: bool) -> None:
    """Serve the process `parent` over an inherited connection. `network`: whether tools may use the network."""
    die_with(parent)
    adopt_orphans()
    unsafe = None if network else leave_network()
    os.set_inheritable(connection_fd, False)
    connection, own = Connection(connection_fd), os.getpid()
    try:
        while True:
            request = json.loads(connection.recv_bytes())
            if "path" in request:
                answer = _load(request["path"]) if unsafe is None else {"loaded": False, "why": unsafe}
            else:
                answer = _call(request)
            if os.getpid() != own:  # the tool has forked, and this is the child
                os._exit(0)
            connection.send_bytes(json.dumps(answer).encode())
    except (EOFError, ConnectionError):  # the parent is gone
        os._exit(0)


_loaded: list[Tool] = []
"""The tool of the next call."""


_NEW_USERS, _NEW_NETWORK = 0x10000000, 0x40000000


def leave_network() -> str | None:
    """Move this process, and its future children, to an isolated network namespace. Return why that fails, else
    None."""
    if sys.platform != "linux":
        return None  # docs/security.md says so
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(_NEW_NETWORK) == 0:
        return None
    if libc.unshare(_NEW_USERS | _NEW_NETWORK) != 0:
        why = os.strerror(ctypes.get_errno())
        return f"this machine cannot block its network access ({why}): allow user namespaces, or set \
rollout.tool_options.network"
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return None


def _load(path: str) -> dict[str, Any]:
    try:
        _loaded[:] = [_tool(path)]
    except (BadPlugin, TypeError, ValueError) as error:
        return {"loaded": False, "why": str(error)}
    return {"loaded": True}


@cache
def _tool(path: str) -> Tool:
    loaded = load_callable(path)
    return loaded if isinstance(loaded, Tool) else Tool(loaded, kind="pure")


def _call(request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        with _memory(request["memory"]):
            tool = _loaded[0].renamed(request["name"], request["max_output"])
            return {"result": tool.call(request["arguments"], request["key"]), "spoilt": _has_children()}
    except ToolFailed as failed:
        spoilt = failed.reason is Reason.MEMORY or _has_children()
        return {"failed": str(failed), "reason": failed.reason, "spoilt": spoilt}
    except ToolUnavailable as error:
        return {"unavailable": str(error), "spoilt": _has_children()}


@contextmanager
def _memory(limit: int) -> Iterator[None]:
    """Allow `limit` more bytes of data than the process holds."""
    if sys.platform != "linux":
        yield
        return
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data() + limit, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _data() -> int:
    """Return the bytes of data that the process holds."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmData"))


def _has_children() -> bool:
    """Return whether the call left child processes running; reap those that have exited."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True
