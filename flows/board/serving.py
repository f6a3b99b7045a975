"""The board's server, alone or below `cairn up`.

    python -P -m cairn.flows.board.serving PARENT_PID HOST PORT

The main program is the child of `cairn up`: it prints the board's address when it serves, and ends with its parent. The
environment names the store and the token, which other users of the machine do not see there.
"""

import argparse
import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from contextlib import closing, suppress

from cairn.configs.errors import BadInput
from cairn.storage.store.store import Store

TOKEN = "CAIRN_BOARD_TOKEN"
"""Environment variable with the token of the child of `cairn up`."""
NICENESS = 19
"""How far the board stands back from drivers on the same machine."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises BadInput if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # else asyncio sets no TCP_NODELAY
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise BadInput(f"the board cannot listen at {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL of a board without a slash at its end."""
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def free_address(host: str, port: int) -> str:
    """Return the URL of a board that is to be started: at this port, or at another where it is in use."""
    try:
        listener = listen(host, port)
    except BadInput:
        listener = listen(host, 0)
    with listener:
        return address(listener)


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(24)


def serve(store: Store, listener: socket.socket, token: str, price: float | None = None) -> None:
    """Serve the board of a store until SIGINT or SIGTERM."""
    import uvicorn

    from cairn.flows.board.app import Board
    from cairn.flows.board.reader import StoreReader
    from cairn.flows.orchestration.server_process import SameOriginOnly

    with suppress(OSError):
        os.nice(NICENESS)
    with closing(StoreReader(store, price)) as reader:
        app = SameOriginOnly(Board(reader, token, price).app(), listener.getsockname()[0])
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        asyncio.run(uvicorn.Server(config).serve(sockets=[listener]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.flows.board.serving")
    parser.add_argument("parent", type=int, help="id of the process that ends this one with it")
    parser.add_argument("host", help="address to listen on")
    parser.add_argument("port", type=int, help="port to listen at")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then sends SIGTERM
    from cairn.storage.opening import open_store

    def leave_with_parent() -> None:
        while os.getppid() == arguments.parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    listener = listen(arguments.host, arguments.port)
    print(address(listener), flush=True)
    serve(open_store(os.environ["CAIRN_STORE"]), listener, os.environ.pop(TOKEN))


if __name__ == "__main__":
    main()
