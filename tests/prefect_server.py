"""One Prefect server for all tests of a session: its database takes long to create."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of its API. Drivers that find it in PREFECT_API_URL start no server of their own."""
    from cairn.flows.orchestration.server import Server  # tests without it need not wait for Prefect's import

    server = Server(tmp_path_factory.mktemp("prefect"))
    server.wait_ready()
    yield server.api_url
    server.stop()
