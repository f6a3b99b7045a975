"""A Redis server for the state of a Ray head. Debian and Ubuntu have it as the package redis-server."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import wait_for


def why_not() -> str | None:
    """Why there can be no such server; None where there can."""
    return None if shutil.which("redis-server") else "there is no redis-server: `apt-get install redis-server`"


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """A server on this machine that stores nothing in files. Yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port))
        yield f"127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
