import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from cairn.storage.leases import Lease

# Ray's workers give way to every other process by default: a test beside them would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

# A busy machine is slow, and that is no failure.
settings.register_profile("cairn", deadline=None)
settings.load_profile("cairn")

pytest_plugins = [
    "tests.scheduling",
    "tests.s3",
    "tests.tiny_run",
    "tests.ray_fixtures",
    "tests.sglang_server",
    "tests.prefect_server",
    "tests.browser",
]


@pytest.fixture(autouse=True)
def _leases_end_with_their_test() -> Iterator[None]:
    """A lease that nobody gave back would be renewed every few seconds until the session ends."""
    begun: list[Lease] = []
    begin = Lease.__init__

    def note_and_begin(lease: Lease, *args: Any) -> None:
        begun.append(lease)
        begin(lease, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lease, "__init__", note_and_begin)
        yield
    for lease in begun:
        lease._ended.set()
