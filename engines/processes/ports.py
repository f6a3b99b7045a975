"""Ports for servers."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from cairn.engines.types.errors import EngineError

PORTS_GIVEN_AWAY = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The lowest and the highest port of outgoing connections, and"""
LOWEST_GIVEN_AWAY = 32768
"""the lowest where nobody has changed it."""


def free_port(host: str = "127.0.0.1") -> int:
    """A port of this machine's address that nobody listens on at the moment, and that no outgoing connection gets until
    somebody does: one below those that the kernel gives away. Raises EngineError where there is none."""
    highest = LOWEST_GIVEN_AWAY
    with suppress(OSError):  # some sandboxes show nothing of the kernel
        highest = min(int(PORTS_GIVEN_AWAY.read_text().split()[0]), highest)
    lowest = max(1024, highest - 12000)
    for _ in range(100):
        with suppress(OSError), socket.socket() as listener:
            listener.bind((host, lowest + secrets.randbelow(highest - lowest) if highest > lowest else 0))
            return listener.getsockname()[1]
    raise EngineError(f"no port of {host} is free: end what listens there")


# Services of our own on this machine are asked by this machine alone.


_HOSTS = ("127.0.0.1", "localhost", "::1")


def spare_loopback() -> None:
    """Keep proxies of the environment from loopback, in this process and those that it starts: clients of Prefect's
    server, of captures and of rollout servers would ask a proxy for them. Other hosts are asked as before."""
    given = ",".join(os.environ.get(name, "") for name in ("NO_PROXY", "no_proxy"))
    hosts = dict.fromkeys([*filter(None, map(str.strip, given.split(","))), *_HOSTS])
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = ",".join(hosts)
