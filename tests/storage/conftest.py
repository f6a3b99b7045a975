"""The stores that the contract tests run on."""

import pytest

from cairn.storage.store import Store, open_store


@pytest.fixture(params=["local", "s3"])
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An empty store of each kind."""
    if request.param == "local":
        return open_store(str(tmp_path_factory.mktemp("store") / "root"))
    return open_store(request.getfixturevalue("s3_url"))
