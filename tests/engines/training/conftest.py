from pathlib import Path

import pytest

from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from tests.engines.training.builders import model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the tests of engines."""
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))
