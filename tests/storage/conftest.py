"""The stores that the storage tests run on: local files, and where a test proves the contract of stores, S3 too.

The contract is what everything durable rests on: the store's own promises, leases, commits and logs. A test or a module
marked `contract` runs on every kind of store; what is built on these promises alone runs on local files. On S3 such a
test is a proof, unless its mark names another tier.
"""

import pytest

from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from tests.tiers import Tier, marks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "store" in metafunc.fixturenames:
        contract = metafunc.definition.get_closest_marker("contract")
        tier = Tier.PROOFS if contract is None else contract.kwargs.get("tier", Tier.PROOFS)
        s3 = pytest.param("s3", marks=marks(tier))
        metafunc.parametrize("store", ["local", s3] if contract else ["local"], indirect=True)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """An empty store of the kind that is asked for."""
    if request.param == "local":
        return open_store(str(tmp_path_factory.mktemp("store") / "root"))
    return open_store(request.getfixturevalue("s3_url"))
