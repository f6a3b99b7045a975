"""The command with which Ray starts a worker of a driver's own cluster. It hands the worker over to the driver's warm
process, if that process accepts it.

    python launch.py WORKER ARGUMENT…        in place of Ray's own `setup_worker.py`, which is next to the worker's file

This file is run as a script, with the standard library alone: see cairn.engines.fleet.warm.
"""

import json
import os
import socket
import sys

ADDRESS = "CAIRN_WARM_PROCESS"
"""Environment variable with the abstract address at which the warm process listens."""

PATIENCE = 120.0
"""Seconds that the warm process may take to import its modules, and to fork."""

NO_RUNTIME_ENVIRONMENT = ("", "{}")
"""Values that Ray passes for a worker that needs nothing installed or set."""


def main(arguments: list[str]) -> None:
    worker = [word for word in arguments if not word.startswith(("--serialized-runtime-env-context", "--language"))]
    if _needs_nothing(arguments) and _forked(os.environ.get(ADDRESS), worker):
        return
    setup = os.path.join(os.path.dirname(arguments[0]), "setup_worker.py")
    os.execv(sys.executable, [sys.executable, setup, *arguments])


def _needs_nothing(arguments: list[str]) -> bool:
    """Return whether Ray requests a plain Python worker."""
    options = dict(word.split("=", 1) for word in arguments if word.startswith("--") and "=" in word)
    return (
        arguments[0].endswith(".py")
        and options.get("--language") == "PYTHON"
        and options.get("--serialized-runtime-env-context", "") in NO_RUNTIME_ENVIRONMENT
    )


def _forked(address: str | None, worker: list[str]) -> bool:
    """Return whether the warm process has forked a worker with these arguments."""
    if address is None:
        return False
    request = {"arguments": worker, "environment": dict(os.environ), "folder": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as warm:
            warm.settimeout(PATIENCE)
            warm.connect(f"\0{address}")
            message = json.dumps(request).encode()
            socket.send_fds(warm, [message[:1]], [0, 1, 2])
            warm.sendall(message[1:])
            warm.shutdown(socket.SHUT_WR)
            return warm.recv(16) == b"forked"
    except OSError:
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
