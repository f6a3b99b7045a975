"""The process of the embedded Prefect server, which `cairn.flows.orchestration.server` starts and documents."""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from contextlib import closing, contextmanager
from functools import partial
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from cairn.engines.processes.deferred import collecting_later

# Protection of Prefect's server against requests from pages of other sites.
#
# A browser sends requests on behalf of any page, and names that page's origin in headers. Rejected (403) are requests
#
# | with | because |
# |---|---|
# | a `Host` that is no address, not `localhost`, and no name of this machine | DNS may point another name here |
# | an `Origin` with another host or port, or without one (`null`) | a page of another origin sends it |
# | a `Sec-Fetch-Site` of another site, except for a followed link | a page of another site sends it |
# | a body that is not declared `application/json` | pages may send such bodies without permission |
#
# Programs send neither `Origin` nor `Sec-Fetch-Site`. Names of this machine are its host name, the one that the server
# listens at, and those in the environment variable `CAIRN_HOSTS`, separated by commas.


HOSTS = "CAIRN_HOSTS"
"""Environment variable with further names of this machine, separated by commas."""

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:[0-9]{1,5})?")

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]


class SameOriginOnly:
    """An ASGI application that passes allowed requests to another one, and rejects the others."""

    def __init__(self, app: App, *names: str) -> None:
        """`names`: further names of this machine."""
        more = [name.strip() for name in os.environ.get(HOSTS, "").split(",")]
        self._app = app
        self._names = frozenset(name.lower() for name in ("localhost", socket.gethostname(), *names, *more) if name)

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        why = refusal(scope.get("method", "GET"), scope["headers"], self._names) if "headers" in scope else None
        if why is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()  # the request to open it; closing it instead answers with 403
            await send({"type": "websocket.close", "code": 1008, "reason": why})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": json.dumps({"detail": why}).encode()})


def refusal(method: str, headers: Collection[tuple[bytes, bytes]], names: Collection[str]) -> str | None:
    """Return why a request is rejected; None if it is allowed. `headers` are in lower case, `names` those of this
    machine."""
    values: dict[str, list[str]] = {}
    for name, value in headers:
        values.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
    hosts = values.get("host", [])
    if len(hosts) != 1 or not _is_local_name(hosts[0], names):
        return (
            f"{', '.join(hosts) or 'no host'} is not a name of this machine: add it to the environment variable {HOSTS}"
        )
    for origin in values.get("origin", []):
        if origin.partition("://")[2].lower() != hosts[0].lower():
            return "a page of another origin may not call this server"
    if not {*values.get("sec-fetch-site", [])} <= {"same-origin", "none"} and not _follows_a_link(method, values):
        return "a page of another site may not call this server"
    length = values.get("content-length", ["0"])
    has_body = "transfer-encoding" in values or length != ["0"]
    kinds = [kind.partition(";")[0].strip().lower() for kind in values.get("content-type", [])]
    if has_body and kinds != ["application/json"]:
        return "a body must be declared as application/json"
    return None


def _is_local_name(host: str, names: Collection[str]) -> bool:
    match = _HOST.fullmatch(host)
    if match is None:
        return False
    name = match[1].lower()
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return name in names
    return True


def _follows_a_link(method: str, values: dict[str, list[str]]) -> bool:
    mode, destination = values.get("sec-fetch-mode"), values.get("sec-fetch-dest")
    return method == "GET" and mode == ["navigate"] and destination == ["document"]


def prefect() -> SameOriginOnly:
    """Return Prefect's application, for `uvicorn --factory`."""
    from prefect.server.api.server import create_app

    return SameOriginOnly(create_app(final=True))


def create(database: Path) -> None:
    """Create Prefect's SQLite database atomically, unless it exists.

    All of Prefect's migrations take six seconds of CPU time. So they run once for each machine and version of Prefect,
    into a file in the user's cache, and a new database is a copy of that file.
    """
    if database.exists():
        return
    cached = _cache() / f"prefect-{version('prefect')}.db"
    try:
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            _create_atomically(cached, _migrate)
        _create_atomically(database, partial(shutil.copyfile, cached))
    except OSError:  # no cache can be written here: the server migrates a database of its own as it starts
        return


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn"


def _create_atomically(file: Path, make: Callable[[Path], object]) -> None:
    """Create a file under a temporary name, and rename it when it is complete."""
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        make(temporary)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _migrate(database: Path) -> None:
    import anyio
    from prefect.server.database.alembic_commands import alembic_upgrade
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
    from prefect.utilities.asyncutils import run_sync_in_worker_thread

    with tempfile.TemporaryDirectory() as folder:
        migrated = Path(folder) / DATABASE
        with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: database_url(migrated)}):
            anyio.run(run_sync_in_worker_thread, alembic_upgrade)
        with closing(sqlite3.connect(migrated)) as connection:
            connection.execute("VACUUM INTO ?", (str(database),))  # one file, with the contents of the log


DATABASE = "prefect.db"

STOP_TIMEOUT = 10.0
"""Seconds that a server has to write pending data and exit before it is killed."""


def database_url_in(home: Path) -> str:
    """Return the database URL of the server over `home`; the environment may override it."""
    return database_url(home / DATABASE)


def database_url(file: Path) -> str:
    """Return the SQLAlchemy URL of a database file."""
    return "sqlite+aiosqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def serve(listener: socket.socket, parent: int, host: str) -> None:
    """Serve Prefect's application on `listener` until SIGTERM, or until process `parent` is gone. `host`: the name or
    address that the server listens at."""
    server: Any = None

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if server is not None and server.started:
            server.should_exit = True  # it first writes pending data
            time.sleep(STOP_TIMEOUT)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()

    with collecting_later():
        import uvicorn
        from prefect.server.api.server import create_app
        from prefect.server.database.configurations import AioSqliteConfiguration
        from prefect.server.database.dependencies import set_database_config
        from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL
        from prefect.settings import PREFECT_HOME as SERVER_HOME

    class ImmediateTransactions(AioSqliteConfiguration):
        """Takes SQLite's write lock at the beginning of a transaction, instead of failing at its first write."""

        def begin_transaction(self, session: Any, with_for_update: bool = False) -> Any:
            return super().begin_transaction(session, with_for_update=True)

    class OneAtATime(uvicorn.Server):
        """Holds a lock while it migrates the database, against other servers that start over the same home."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with alone():
                await super().startup(sockets)

    @contextmanager
    def alone() -> Iterator[None]:
        with (SERVER_HOME.value() / "start.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    if not sys.stdin.buffer.read(1):
        os._exit(1)  # the parent is gone: no signal to serve will come
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url == database_url_in(SERVER_HOME.value()):
        with alone():
            create(SERVER_HOME.value() / DATABASE)
    if url.startswith("sqlite"):
        set_database_config(ImmediateTransactions(url))
    config = uvicorn.Config(
        SameOriginOnly(create_app(final=True), host),
        log_level="warning",
        timeout_graceful_shutdown=3,
        ws_per_message_deflate=False,  # events come over loopback
    )
    server = OneAtATime(config)
    asyncio.run(server.serve(sockets=[listener]))


def _main() -> None:
    parser = argparse.ArgumentParser(prog="cairn.flows.orchestration.server_process")
    parser.add_argument("listener", type=int, help="file descriptor of a listening socket")
    parser.add_argument("parent", type=int, help="process id of the driver")
    parser.add_argument("host", help="address to listen on")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        serve(socket.socket(fileno=arguments.listener), arguments.parent, arguments.host)


if __name__ == "__main__":
    _main()
