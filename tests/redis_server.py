"""A Redis server for the state of a Ray head. Debian and Ubuntu have it as the package redis-server."""

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_for

PASSWORD = "for-redis"


@dataclass(frozen=True)
class Redis:
    """A server, as a Ray head is told of it."""

    address: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for `ray start --head`."""
        return {"RAY_REDIS_ADDRESS": self.address}

    @property
    def options(self) -> list[str]:
        """Options for `ray start --head`."""
        return [f"--redis-password={PASSWORD}"]


def why_not() -> str | None:
    """Why there can be no such server; None where there can."""
    return None if shutil.which("redis-server") else "there is no redis-server: `apt-get install redis-server`"


@contextmanager
def redis_server(folder: Path) -> Iterator[Redis]:
    """A server on this machine that stores nothing in files."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--save", "", "--appendonly", "no", "--requirepass", PASSWORD]  # as in docker-compose.yml
    here = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
    server = subprocess.Popen(["redis-server", *options, *here], stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(port))
        yield Redis(f"127.0.0.1:{port}")
    finally:
        server.kill()
        server.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
