"""Prefect's SQLite database, new and empty, from database.sql: what all of Prefect's migrations together make.

To run them takes six seconds of CPU time, to read the file a twentieth of one. A newer Prefect runs those that came
since by itself; after an update of it, `python -m cairn.flows.orchestration.database` writes the file again.
"""

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

FILE = Path(__file__).with_suffix(".sql")


def create(database: Path) -> None:
    """Make the database, whole or not at all, unless it is there."""
    if database.exists():
        return
    made = database.with_suffix(f".{os.getpid()}")
    made.unlink(missing_ok=True)
    with closing(sqlite3.connect(made)) as connection:
        connection.executescript(FILE.read_text())
    made.rename(database)


def migrated() -> str:
    """The SQL of a database after all migrations of the Prefect that is installed."""
    import anyio
    from prefect.server.database.alembic_commands import alembic_upgrade
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL, temporary_settings
    from prefect.utilities.asyncutils import run_sync_in_worker_thread

    from cairn.flows.orchestration.server_process import database_url

    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "prefect.db"
        with temporary_settings({PREFECT_API_DATABASE_CONNECTION_URL: database_url(database)}):
            anyio.run(run_sync_in_worker_thread, alembic_upgrade)
        with closing(sqlite3.connect(database)) as connection:
            return "".join(f"{line}\n" for line in connection.iterdump())


if __name__ == "__main__":
    FILE.write_text(migrated())
