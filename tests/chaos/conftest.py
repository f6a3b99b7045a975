"""Struck runs, and their undisturbed twins."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import in_process
from tests.chaos.runs import Disturbed, chaos_config
from tests.chaos.services import Services
from tests.shared_memory import watched_segments


@pytest.fixture(scope="session")
def config_file(tiny_assets: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("config") / "config.json"
    file.write_text(chaos_config(tiny_assets).model_dump_json())
    return file


@pytest.fixture
def disturbed(tmp_path: Path, config_file: Path, api_url: str) -> Iterator[Disturbed]:
    with watched_segments() as left_segments:
        run = Disturbed(tmp_path, config_file, {"PREFECT_API_URL": api_url})
        yield run
        left = run.left_behind(patience=60)
        run.kill_what_is_left()
        assert not left
        assert not left_segments()


@pytest.fixture(scope="session")
def services(tmp_path_factory: pytest.TempPathFactory, tiny_assets: Path, api_url: str) -> Iterator[Services]:
    shared = Services(tmp_path_factory.mktemp("standing"))
    shared.assets, shared.api_url = tiny_assets, api_url
    yield shared
    shared.close()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> Disturbed:
    return in_process.undisturbed(tmp_path_factory.mktemp("undisturbed"), config_file)
