"""What is watched of a Ray cluster: whether its processes live, whether its head answers, whether its machines stay."""

import contextlib
import math
import os
import select
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence

import psutil
import ray

HEAD = ("gcs_server", "raylet")
"""Processes without which a cluster is none. Ray waits for their return, for a minute or for ever."""

LOOK_INTERVAL = 0.5
"""Seconds after which a watch of them notices that the cluster was closed."""

HEAD_SILENCE = 40.0
"""Seconds after which the silent head of a joined cluster is given up: Ray ends a process without a word after 60."""

HEAD_INTERVAL = 5.0
"""Seconds between two looks at it, and what its answer may take."""

JOIN_ANSWER = 10.0
"""Seconds within which a cluster that is to be joined must answer: Ray itself waits two minutes for an address where
nothing does, and then ends the process."""


def first_to_die(processes: Sequence[psutil.Process], names: Sequence[str], closing: threading.Event) -> str | None:
    """Name of the first of these processes, one of each name, that dies or is dead; None if `closing` is set
    before."""
    with contextlib.ExitStack() as stack:
        ends = select.poll()
        found: dict[int, str] = {}
        for process in processes:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                descriptor = os.pidfd_open(process.pid)
                stack.callback(os.close, descriptor)
                found[descriptor] = process.name()
                ends.register(descriptor, select.POLLIN)
        died = [name for name in names if name not in found.values()]
        while not died and not closing.is_set():
            died = [found[descriptor] for descriptor, _ in ends.poll(LOOK_INTERVAL * 1000)]
    return None if closing.is_set() else died[0]


def head_processes() -> list[psutil.Process]:
    """The processes of the head that this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
            if child.name() in HEAD:
                found.append(child)
    return found


def raylet_here() -> Iterator[psutil.Process]:
    """The raylet by which this process takes part in a cluster, where it can be seen."""
    node = f"--node_id={ray.get_runtime_context().get_node_id()}"
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.name() == "raylet" and node in process.cmdline():
                yield process


def no_answer(address: str, timeout: float) -> Exception | None:
    """Why nothing answers at `host:port`; None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout).close()
    except (OSError, ValueError) as error:
        return error
    return None


def seconds_until_drained(nodes: Collection[str]) -> float | None:
    """Seconds until the first of these nodes goes, as its cluster was told; None where none is to go."""
    told = draining()
    ends = [told[node] / 1000 or math.inf for node in nodes if node in told]
    return max(0.0, min(ends) - time.time()) if ends else None


def draining() -> dict[str, int]:
    """The nodes that are to go, by their ids, and when, in milliseconds of Unix time; 0: at no certain time."""
    told: dict[str, int] = ray._private.state.state.get_draining_nodes()  # as Ray Serve and Ray Train learn it
    return told


def living() -> set[str]:
    """The nodes of the cluster, by their ids, but for those that are gone."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
