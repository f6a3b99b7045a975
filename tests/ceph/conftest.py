"""The storage tests on a Ceph object gateway. They run where they are asked for: `pytest -m ceph tests/ceph`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from cairn.storage.opening import open_store
from cairn.storage.store.store import Store
from tests.ceph.rgw import gateway, prepare_packages
from tests.s3 import S3Server, use_server


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs the gateway; leave out what does not, and all of it unless Ceph was asked for."""
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    needed = [item for item in here if {"store", "ceph"} & set(getattr(item, "fixturenames", ()))]
    for item in needed:
        item.add_marker(pytest.mark.ceph)
    kept = needed if "ceph" in config.option.markexpr else []
    left_out = [item for item in here if item not in kept]
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def ceph() -> Iterator[S3Server]:
    """The session's gateway."""
    with gateway(prepare_packages()) as server:
        yield server


@pytest.fixture
def store(ceph: S3Server, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store in a fresh bucket."""
    use_server(monkeypatch, ceph)
    return open_store(f"s3://{ceph.new_bucket()}/some/prefix")
