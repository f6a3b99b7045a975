"""A new Prefect database: all of Prefect's migrations, run once."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy.engine.url import make_url

from cairn.flows.orchestration import server_process
from cairn.flows.orchestration.server_process import create, database_url_in


def newest_migration() -> str | None:
    import prefect.server.database
    from alembic.script import ScriptDirectory

    migrations = Path(prefect.server.database.__file__).with_name("_migrations")
    return ScriptDirectory(migrations, version_locations=[migrations / "versions" / "sqlite"]).get_current_head()


def migration_of(database: Path) -> list[tuple[str]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT version_num FROM alembic_version").fetchall()


def test_the_database_lies_in_its_folder_whatever_that_is_called() -> None:
    for name in ("a?b", "50%20", "a#b", "with space"):
        assert make_url(database_url_in(Path("/home") / name)).database == f"/home/{name}/prefect.db"


def test_migrations_run_once_and_a_database_that_is_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    create(first)
    assert migration_of(first) == [(newest_migration(),)]
    with sqlite3.connect(first) as connection:
        connection.execute("CREATE TABLE history (run)")
    create(first)
    assert migration_of(first)
    with sqlite3.connect(first) as connection:
        connection.execute("SELECT run FROM history")

    monkeypatch.setattr(server_process, "_migrate", lambda database: pytest.fail("they ran already"))
    create(second)
    assert migration_of(second) == migration_of(first)
    assert {file.name for file in tmp_path.iterdir()} == {"cache", "first.db", "second.db"}


def test_a_server_makes_its_own_database_where_no_cache_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    create(tmp_path / "prefect.db")
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
