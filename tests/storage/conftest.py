"""The stores that the storage tests run on: local files, and where a test proves the contract of stores, S3 too.

The contract is what everything durable rests on: the store's own promises, leases, commits and logs. A test or a module
marked `contract` runs on every kind of store; what is built on these promises alone runs on local files.
"""

import pytest

from cairn.storage.store import Store, open_store

KINDS = ("local", "s3")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        contract = metafunc.definition.get_closest_marker("contract")
        metafunc.parametrize("store", KINDS if contract else KINDS[:1], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An empty store of the kind that is asked for."""
    if request.param == "local":
        return open_store(str(tmp_path_factory.mktemp("store") / "root"))
    return open_store(request.getfixturevalue("s3_url"))
