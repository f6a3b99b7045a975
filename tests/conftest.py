import os

import pytest

# Ray's workers give way to every other process by default: a test beside them would starve them.
os.environ.setdefault("RAY_worker_niceness", "0")

pytest_plugins = ["tests.s3", "tests.tiny_run", "tests.ray_fixtures", "tests.sglang_server"]

TOGETHER = ("tests/chaos", "tests/engines/rollout/sglang")
"""Folders whose tests share what takes long to start."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes run the tests, those of a file run in one, which makes the file's fixtures once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            file = item.path.relative_to(config.rootpath).as_posix()
            item.add_marker(pytest.mark.xdist_group(next((one for one in TOGETHER if file.startswith(one)), file)))
