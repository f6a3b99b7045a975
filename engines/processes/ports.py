"""Selection of ports for servers, and proxy settings for loopback."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from cairn.engines.types.errors import EngineError

EPHEMERAL_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""File with the lowest and the highest port of outgoing connections."""
LOWEST_EPHEMERAL_PORT = 32768
"""Lowest port of outgoing connections by default."""


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free port of this machine's address.

    The port is below those of outgoing connections, so that none of these takes it before a server listens on it.
    Raises EngineError where there is none.
    """
    highest = LOWEST_EPHEMERAL_PORT
    with suppress(OSError):  # some sandboxes show nothing of the kernel
        highest = min(int(EPHEMERAL_PORTS_FILE.read_text().split()[0]), highest)
    lowest = max(1024, highest - 12000)
    for _ in range(100):
        with suppress(OSError), socket.socket() as listener:
            listener.bind((host, lowest + secrets.randbelow(highest - lowest) if highest > lowest else 0))
            return listener.getsockname()[1]
    raise EngineError(f"no port of {host} is free: end a process that listens there")


# Only this machine itself calls Cairn's services on it.


_HOSTS = ("127.0.0.1", "localhost", "::1")


def bypass_proxy_for_loopback() -> None:
    """Exclude loopback addresses from the proxies of the environment, in this process and its children.

    Otherwise clients of Prefect's server, of captures and of rollout servers would connect through a proxy. Other hosts
    are not affected.
    """
    excluded = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    hosts = dict.fromkeys([*filter(None, map(str.strip, excluded.split(","))), *_HOSTS])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(hosts)
