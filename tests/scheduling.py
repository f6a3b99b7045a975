"""Which tests run in one process: those of a file, and those of a folder whose tests share what takes long to start."""

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

TOGETHER = ("tests/chaos/", "tests/engines/rollout/sglang/")
"""Folders with a Prefect server and an undisturbed run, and with an SGLang server, for all of their tests."""


class ByFileOrFolder(LoadFileScheduling):
    """As `--dist loadfile`, but for the folders that stay together."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return next((folder for folder in TOGETHER if file.startswith(folder)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFileOrFolder:
    return ByFileOrFolder(config, log)
