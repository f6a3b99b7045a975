"""A new Prefect database: as Prefect's migrations make one, and without them."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.engine.url import make_url

from cairn.flows.orchestration.server_process import FILE, create, database_url_in, migrated


def dumped(database: Path) -> str:
    return "".join(f"{line}\n" for line in sqlite3.connect(database).iterdump())


def statements(sql: str) -> list[str]:
    """Its lines in an order of their own: migrations copy indexes and constraints in any."""
    return sorted(line.rstrip(", ") for line in sql.splitlines())


def test_the_database_lies_in_its_folder_whatever_that_is_called() -> None:
    for name in ("a?b", "50%20", "a#b", "with space"):
        assert make_url(database_url_in(Path("/home") / name)).database == f"/home/{name}/prefect.db"


def test_a_database_is_made_whole_and_one_that_is_there_stays(tmp_path: Path) -> None:
    database = tmp_path / "prefect.db"
    create(database)
    assert dumped(database) == FILE.read_text()
    assert list(tmp_path.iterdir()) == [database]
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE history (run)")
    create(database)
    assert "CREATE TABLE history" in dumped(database)


def test_the_file_is_of_the_prefect_that_is_installed() -> None:
    import prefect.server.database
    from alembic.script import ScriptDirectory

    migrations = Path(prefect.server.database.__file__).with_name("_migrations")
    newest = ScriptDirectory(migrations, version_locations=[migrations / "versions" / "sqlite"]).get_current_head()
    assert f"INSERT INTO \"alembic_version\" VALUES('{newest}')" in FILE.read_text(), (
        "run python -m cairn.flows.orchestration.server_process"
    )


@pytest.mark.slow
def test_the_file_is_what_all_migrations_make() -> None:
    assert statements(migrated()) == statements(FILE.read_text())
