"""The process of the embedded Prefect server, which `cairn.flows.orchestration.server` starts: see there."""

import argparse
import asyncio
import contextlib
import fcntl
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from cairn.engines.deferred import collecting_later

DATABASE = "prefect.db"

STOP_TIMEOUT = 10.0
"""Seconds a server may take to write what it still holds and leave; then it is killed."""


def database_url_in(home: Path) -> str:
    """Of the server over `home`, unless the environment names another database."""
    return database_url(home / DATABASE)


def database_url(file: Path) -> str:
    """As SQLAlchemy reads it."""
    return "sqlite+aiosqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def _mend_bulk_inserts() -> None:
    """Let Prefect schedule flow runs. It inserts them in bulk with values for attributes that are computed and no
    columns; SQLAlchemy 2.0 passed over these, 2.1 refuses the whole insert. They are passed over again."""
    from prefect.server.database.orm_models import FlowRun, TaskRun
    from sqlalchemy import inspect
    from sqlalchemy.ext.hybrid import hybrid_property

    def pass_over(name: str) -> Any:
        return lambda model, row, value: row.pop(name, None)

    for model in (FlowRun, TaskRun):
        mapper: Any = inspect(model)
        for name, attribute in mapper.all_orm_descriptors.items():
            if isinstance(attribute, hybrid_property) and attribute.bulk_dml_setter is None:
                attribute.bulk_dml_setter = pass_over(name)


def serve(listener: socket.socket, parent: int, host: str) -> None:
    """Serve Prefect's application on `listener` until told to stop or until process `parent` is gone. `host`: the name
    or address that it was told to listen at."""
    server: Any = None

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        if server is not None and server.started:
            server.should_exit = True  # it writes what it holds first
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

        from cairn.flows.orchestration.database import create
        from cairn.flows.orchestration.own_pages import OwnPages

    _mend_bulk_inserts()

    class ImmediateTransactions(AioSqliteConfiguration):
        """Takes SQLite's write lock when a transaction begins, instead of failing when it first writes."""

        def begin_transaction(self, session: Any, with_for_update: bool = False) -> Any:
            return super().begin_transaction(session, with_for_update=True)

    class OneAtATime(uvicorn.Server):
        """Makes or migrates the database alone, whoever else starts over the same home."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            with (SERVER_HOME.value() / "start.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if url == database_url_in(SERVER_HOME.value()):
                    create(SERVER_HOME.value() / DATABASE)
                await super().startup(sockets)

    if not sys.stdin.buffer.read(1):
        os._exit(1)  # nobody will tell it to serve any more
    url = PREFECT_API_DATABASE_CONNECTION_URL.value()
    if url.startswith("sqlite"):
        set_database_config(ImmediateTransactions(url))
    config = uvicorn.Config(
        OwnPages(create_app(final=True), host),
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
    parser.add_argument("host", help="what it listens at")
    arguments = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        serve(socket.socket(fileno=arguments.listener), arguments.parent, arguments.host)


if __name__ == "__main__":
    _main()
