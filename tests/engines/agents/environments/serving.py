"""A server of a test, in a process of its own."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from tests.waiting import wait_for


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[None]:
    """From when it takes connections until it has ended."""
    process = subprocess.Popen(command)

    def takes_connections() -> bool:
        assert process.poll() is None, f"{command} ended with exit code {process.returncode}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    try:
        wait_for(takes_connections)
        yield
    finally:
        process.kill()
        process.wait()
